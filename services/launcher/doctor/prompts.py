"""Length check of the environments' prompts with their tools, by the policy's tokenizer and
chat template: a prompt that is too long is found before an engine is loaded."""

import base64
import json
from collections.abc import Mapping
from typing import Any

from services.common.python_command import python_command
from services.launcher.doctor.findings import (
    Finding,
    NotApplicableError,
    UnprobedError,
    fail,
    first_line,
    ok,
    warn,
)
from services.launcher.doctor.policy_files import (
    NoPolicyError,
    fetch_policy_folder,
    reads_text_alone,
)
from services.launcher.doctor.probe_process import run_command
from services.launcher.doctor.run_context import RunContext
from services.launcher.state import ROLLOUT

# The prompt is the rollout's: its own functions make it, in a process of its own. By environment
# how many tokens it has, or why it cannot be made.
_COUNT_SCRIPT = """
import base64, json, sys
from pathlib import Path
from services.common.adapters.hidden_torch import hide_torch

asked = json.load(sys.stdin)
if asked["text_only"]:
    hide_torch()
from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from services.rollout.api import codec
from services.rollout.adapters.dialect_choice import choose_dialect
from services.rollout.adapters.tokenizer import load_tokenizer
from services.rollout.config.rollout import DialectConfig
from services.rollout.ports import TemplateError

config = DialectConfig(**asked["dialect"])
tokenizer = load_tokenizer(
    Path(asked["folder"]),
    trust_remote_code=asked["trust_remote_code"],
    template_options=config.options,
)
told = {}
for env_key, ready in asked["ready"].items():
    ready = pb.EpisodeReady.FromString(base64.b64decode(ready))
    shown = [part.text for part in ready.initial_observation if part.text]
    try:
        episode = codec.episode_from_pb("", ready, shown)
        dialect = choose_dialect(asked["model"], tokenizer, config)
        ids = dialect.prompt_ids(episode.facts, episode.tools)
        told[env_key] = [len(ids), ""]
    except (TemplateError, ValueError, TypeError) as error:
        told[env_key] = [0, str(error)]
print(json.dumps(told))
"""


class UncountedError(Exception):
    """Raised when nothing can be counted yet; the message says why."""


async def check_prompts(
    context: RunContext, opened: Mapping[str, bytes], single_turn: frozenset[str]
) -> dict[str, Finding]:
    """Return one finding per environment; none if the probe `tokenizer` already reports the
    cause. `opened` are the gateway's EpisodeReady messages, as received. Raises
    UncountedError."""
    rollout = context.sections.get(ROLLOUT)
    if rollout is None or not opened:
        return {}
    try:
        folder = await fetch_policy_folder(context)
        executable = context.find_interpreter("tokenizers", "transformers")
    except NotApplicableError as error:
        raise UncountedError(str(error)) from error
    except (NoPolicyError, UnprobedError):
        return {}
    question = {
        "folder": str(folder.resolve()),
        "trust_remote_code": context.shared.policy.trust_remote_code,
        "text_only": reads_text_alone(context),
        "model": context.shared.policy.model,
        "dialect": rollout["dialect"],
        "ready": {env_key: base64.b64encode(text).decode() for env_key, text in opened.items()},
    }
    command = python_command("-c", _COUNT_SCRIPT, executable=executable)
    code, output, errors = await run_command(
        command, json.dumps(question).encode(), context.environ
    )
    if code != 0:
        last = first_line("\n".join(reversed(errors.strip().splitlines())))
        what = f"prompts are not counted: the rollout's functions ended with code {code}: {last}"
        return {"": warn(what, "see whether the rollout's environment is whole")}
    told = json.loads(output.strip().splitlines()[-1])
    return {
        env_key: judge_prompt(env_key, tokens, wrong, rollout, several=env_key not in single_turn)
        for env_key, (tokens, wrong) in told.items()
    }


def judge_prompt(
    env_key: str, tokens: int, wrong: str, rollout: Mapping[str, Any], *, several: bool
) -> Finding:
    """Judge whether a prompt leaves room for a turn, and for another one if there may be
    `several`."""
    most, turn = rollout["max_input_length"], rollout["max_generate_length"]
    if wrong:
        return fail(f"{env_key}: {wrong}", "mend the chat template of policy.model")
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
