"""The policy's small files, in a local folder or on the hub."""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path

from flotilla_common.process.python_command import python_command
from flotilla_launcher.doctor.findings import (
    FindingError,
    NotApplicableError,
    UnprobedError,
    fail,
    first_line,
    warn,
)
from flotilla_launcher.doctor.model_size import (
    ModelSize,
    UnknownModelSizeError,
    count_stored,
    read_model_size,
)
from flotilla_launcher.doctor.probe_process import ScriptError, run_command, run_script
from flotilla_launcher.doctor.run_context import RunContext, is_made_later
from flotilla_launcher.security.service_variables import HUB_TOKEN
from flotilla_launcher.state import ROLLOUT

# Prints the number of parameters.
_COUNT = """
import json, sys
from flotilla_learner.rank.parameter_count import count_parameters
folder, pictures = json.load(sys.stdin)
print(count_parameters(folder, pictures=pictures))
"""
# Exit code of `hub_probe` if the hub has no such model for this user.
_HUB_REFUSED = 2


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on the hub at one commit; sizes in bytes, `missing` and `free` of this machine's
    cache."""

    commit: str
    size: int
    missing: int
    free: int
    cache: str


class NoPolicyError(FindingError):
    """Raised when the policy's files are not available; the message gives the reason."""


async def fetch_policy_folder(context: RunContext) -> Path:
    """Return a folder with the policy's configuration and tokenizer; a model on the hub is
    downloaded without its weights. Raises NoPolicyError, NotApplicableError."""
    policy = context.shared.policy
    for service in context.policy_services:
        # Other implementations may not use a policy.
        context.get_section(service)
    if is_made_later(context, policy.model):
        raise NotApplicableError(
            f"{policy.model} is not there yet: [[prepare]] makes it before the run"
        )
    folder = Path(policy.model)
    if await asyncio.to_thread(folder.is_dir):
        return folder
    return Path((await _query_hub(context)).strip())


async def measure_policy(context: RunContext) -> ModelSize:
    """Return the size of the policy's model. Raises FindingError, NotApplicableError."""
    folder = await fetch_policy_folder(context)
    try:
        counted = count_stored(folder) or await _count_built(context, folder)
        return read_model_size(folder, counted, context.shared.policy.vision)
    except UnknownModelSizeError as error:
        raise FindingError(fail, str(error), "fetch the model again") from error


async def _count_built(context: RunContext, folder: Path) -> int:
    """Count the parameters of a model without weights by building it in the services' interpreter;
    0 if that has no such packages, or does not know the model."""
    question = [str(folder), context.shared.policy.vision is not None]
    try:
        python = context.find_interpreter("torch", "transformers")
        return await run_script(_COUNT, question, context.environ, python)
    except (UnprobedError, ScriptError):
        return 0


def reads_text_alone(context: RunContext) -> bool:
    """Return whether tokenizer and chat template need no torch: the model's own code and vLLM's
    parsers may."""
    dialect = context.sections.get(ROLLOUT, {}).get("dialect", {})
    return not (context.shared.policy.trust_remote_code or dialect.get("parser"))


async def look_up_policy(context: RunContext) -> HubModel:
    """Query the hub for the policy's commit and size. Raises NoPolicyError."""
    return HubModel(**json.loads(await _query_hub(context, look_up=True)))


async def is_policy_cached(context: RunContext) -> bool:
    """Return whether the small files of the hub's model can be had, if only from the cache."""
    try:
        await _query_hub(context)
    except NoPolicyError:
        return False
    return True


async def _query_hub(context: RunContext, *, look_up: bool = False) -> str:
    """Return what the hub's probe prints. Raises NoPolicyError."""
    policy = context.shared.policy
    question = {"model": policy.model, "revision": policy.revision, "look_up": look_up}
    # A download that hangs can be ended only in a process of its own.
    command = python_command("-m", "flotilla_launcher.doctor.adapters.hub_probe")
    code, output, errors = await run_command(
        command, json.dumps(question).encode(), context.environ, also=(HUB_TOKEN,)
    )
    if code != 0:
        reason = first_line(errors) or f"the hub's probe ended with code {code}"
        # Rented machines may reach what this one does not.
        judge = fail if context.backend == "local" or code == _HUB_REFUSED else warn
        raise NoPolicyError(
            judge, reason, "correct policy.model, or set HF_TOKEN for a gated model"
        )
    return output
