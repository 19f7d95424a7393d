"""Length check of the environments' prompts with their tools and pictures, by the policy's
tokenizer, chat template and image processor: a prompt that is too long is found before an engine is
loaded."""

import base64
from collections.abc import Mapping
from typing import Any

from flotilla_common.spec.spec import VisionConfig
from flotilla_launcher.doctor.findings import (
    Finding,
    NotApplicableError,
    UnprobedError,
    fail,
    ok,
    warn,
)
from flotilla_launcher.doctor.policy_files import (
    NoPolicyError,
    fetch_policy_folder,
    reads_text_alone,
)
from flotilla_launcher.doctor.probe_process import ScriptError, run_script
from flotilla_launcher.doctor.run_context import RunContext
from flotilla_launcher.state import ROLLOUT

# The rollout's own functions render the prompt, in a separate process. Prints for each environment
# its number of tokens and of pictures, or why it cannot be rendered.
_COUNT_SCRIPT = """
import asyncio, base64, json, sys
from pathlib import Path
from flotilla_common.adapters.hidden_torch import hide_torch

question = json.load(sys.stdin)
if question["text_only"]:
    hide_torch()
from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla_common.images.vision_family import load_vision_family
from flotilla_common.spec.spec import PolicyConfig
from flotilla_rollout.api import codec
from flotilla_rollout.adapters.dialect_choice import choose_dialect
from flotilla_rollout.adapters.gateway_content import ContentPartReader
from flotilla_rollout.adapters.model_files import find_pad, load_model_tokenizer
from flotilla_rollout.config.rollout import DialectConfig
from flotilla_rollout.episodes.shown_pictures import place_pictures
from flotilla_rollout.tokenizer_port import TemplateError

folder, policy = Path(question["folder"]), PolicyConfig(**question["policy"])
config = DialectConfig(**question["dialect"])
tokenizer = load_model_tokenizer(folder, policy, config)
family = load_vision_family(folder, policy.vision) if policy.vision else None

async def count(reader, ready):
    shown = await reader.read_parts("", ready.initial_observation)
    try:
        episode = codec.episode_from_pb("", ready, shown)
        dialect = choose_dialect(policy.model, tokenizer, config, (), find_pad(tokenizer, family))
        ids = dialect.prompt_ids(episode.facts, episode.tools)
        whole, pictures, _ = place_pictures(ids, episode.facts.pictures, family)
    except (TemplateError, ValueError, TypeError) as error:
        return [0, 0, str(error)]
    return [len(whole), len(pictures), ""]

async def count_all():
    # All parts have their bytes: nothing is fetched.
    reader = ContentPartReader(None, family)
    opened = {
        env_key: pb.EpisodeReady.FromString(base64.b64decode(ready))
        for env_key, ready in question["ready"].items()
    }
    try:
        return {env_key: await count(reader, ready) for env_key, ready in opened.items()}
    finally:
        await reader.close()

print(json.dumps(asyncio.run(count_all())))
"""


class UncountedError(Exception):
    """Raised when prompts cannot be counted yet; the message gives the reason."""


async def check_prompts(
    context: RunContext, opened: Mapping[str, bytes], single_turn: frozenset[str]
) -> dict[str, Finding]:
    """Return one finding per environment; none if the probe `tokenizer` already reports the
    cause. `opened` are the gateway's EpisodeReady messages, with the bytes of all that they show.
    Raises UncountedError."""
    rollout, policy = context.sections.get(ROLLOUT), context.shared.policy
    if rollout is None or not opened:
        return {}
    try:
        folder = await fetch_policy_folder(context)
        executable = context.find_interpreter("tokenizers", "transformers", "PIL")
    except NotApplicableError as error:
        raise UncountedError(str(error)) from error
    except (NoPolicyError, UnprobedError):
        return {}
    question = {
        "folder": str(folder.resolve()),
        "policy": policy.model_dump(mode="json"),
        "text_only": reads_text_alone(context),
        "dialect": rollout["dialect"],
        "ready": {env_key: base64.b64encode(text).decode() for env_key, text in opened.items()},
    }
    try:
        counted = await run_script(_COUNT_SCRIPT, question, context.environ, executable)
    except ScriptError as error:
        what = f"prompts are not counted: the rollout's functions {error}"
        return {"": warn(what, "check that the rollout's environment is complete")}
    return {
        env_key: _judge_pictures(env_key, pictures, policy.vision)
        or judge_prompt(env_key, tokens, wrong, rollout, several=env_key not in single_turn)
        for env_key, (tokens, pictures, wrong) in counted.items()
    }


def _judge_pictures(env_key: str, pictures: int, vision: VisionConfig | None) -> Finding | None:
    if vision is None or pictures <= vision.max_images:
        return None
    what = f"{env_key}: its prompt has {pictures} pictures, and policy.vision.max_images ="
    return fail(f"{what} {vision.max_images}: no turn is played", "raise it")


def judge_prompt(
    env_key: str, tokens: int, wrong: str, rollout: Mapping[str, Any], *, several: bool
) -> Finding:
    """Judge whether a prompt leaves room for a turn, and for another one if there may be
    `several`."""
    most, turn = rollout["max_input_length"], rollout["max_generate_length"]
    if wrong:
        return fail(f"{env_key}: {wrong}", "fix the chat template of policy.model")
    what = f"{env_key}: its prompt with tools is {tokens} tokens"
    fix = (
        f"raise it to {tokens + turn} at least, and policy.max_model_len to"
        f" {tokens + 2 * turn}, or offer fewer tools"
    )
    if tokens > most:
        return fail(f"{what}, and rollout.max_input_length = {most}: no turn is played", fix)
    if several and tokens + turn > most:
        why = f"after a turn of rollout.max_generate_length = {turn} there is no other"
        return warn(f"{what}, and rollout.max_input_length = {most}: {why}", fix)
    return ok(f"{what} of {most}")
