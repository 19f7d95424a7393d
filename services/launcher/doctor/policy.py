"""The policy's small files, wherever they are."""

import asyncio
import json
from pathlib import Path

from services.common.interpreter import python
from services.launcher.doctor.findings import Finding, NotApplicableError, fail, first_line, warn
from services.launcher.doctor.probe_process import output_of
from services.launcher.doctor.run_context import Subject
from services.launcher.security.env_filter import HUB
from services.launcher.state import LEARNER, ROLLOUT

# The exit code of `hub_probe` when the hub answered that it has no such model for us.
_REFUSED = 2


class NoPolicyError(Exception):
    """The policy's files cannot be had; the message says why. `refused`: nobody else can either."""

    def __init__(self, message: str, *, refused: bool) -> None:
        super().__init__(message)
        self.refused = refused


async def policy_folder(subject: Subject) -> Path:
    """A folder with the policy's configuration and tokenizer; of a model on the hub, a downloaded
    one without its weights. Raises NoPolicyError, NotApplicableError."""
    policy = subject.shared.policy
    for service in (LEARNER, ROLLOUT):
        # Other implementations may make nothing of a policy.
        subject.section(service)
    if subject.policy_made_later():
        raise NotApplicableError(
            f"{policy.model} is not there yet: [[prepare]] makes it before the run"
        )
    folder = Path(policy.model)
    if await asyncio.to_thread(folder.is_dir):
        return folder
    question = json.dumps({"model": policy.model, "revision": policy.revision})
    # A download that hangs can be ended only in a process of its own.
    command = python("-m", "services.launcher.doctor.adapters.hub_probe")
    code, output, errors = await output_of(command, question.encode(), subject.environ, also=(HUB,))
    if code != 0:
        raise NoPolicyError(
            f"policy.model {policy.model!r} is neither a folder here ({Path.cwd()}) nor a model on"
            f" the hub that can be reached: {first_line(errors) or f'code {code}'}",
            refused=code == _REFUSED,
        )
    return Path(output.strip())


def without(subject: Subject, error: NoPolicyError) -> Finding:
    """For a policy that cannot be had from here. Rented machines may reach what we do not."""
    fix = "correct policy.model, or set HF_TOKEN for a gated model"
    say = fail if subject.backend == "local" or error.refused else warn
    return say(str(error), fix)
