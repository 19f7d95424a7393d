"""Probe of the checkpoint store: objects can be uploaded, read back and removed, and uploads
are configured."""

from collections.abc import Mapping
from typing import Any

from flotilla_launcher.backends.sky import cost_estimate, machine_candidates
from flotilla_launcher.doctor.findings import Finding, NotApplicableError, fail, warn
from flotilla_launcher.doctor.probe_process import run_probe_module
from flotilla_launcher.doctor.run_context import RunContext
from flotilla_launcher.security.service_variables import STORE_VARIABLES
from flotilla_launcher.state import LEARNER, RunMode

# One of them, or a role of the machine, grants access to a bucket.
_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "FLOTILLA_REMOTE_OPTIONS")
_LEAVE_OUT = (
    'to start without all the same, set launcher.skip_probes = ["store"], or --skip store for this'
    " command"
)


async def probe_store(context: RunContext) -> list[Finding]:
    section = context.get_section(LEARNER)
    checkpoint = section["checkpoint"]
    if checkpoint["remote"] is not None:
        found = await _probe_remote(context, checkpoint)
        return [*found, *_check_handed_keys(context, checkpoint["remote"])]
    config = context.plan.config
    lost = cost_estimate.describe_unkept(section, config)
    if context.backend != "sky" or context.mode is not RunMode.TRAIN or not lost:
        raise NotApplicableError(f"{cost_estimate.REMOTE} is not set: nothing is uploaded")
    # A lost Slurm node costs nothing: homes are on a server.
    judge = warn if machine_candidates.is_on_slurm(config.sky, LEARNER) else fail
    return [judge(lost, f"{cost_estimate.KEEP_HINT}; {_LEAVE_OUT}")]


async def _probe_remote(context: RunContext, checkpoint: Mapping[str, Any]) -> list[Finding]:
    question = {
        "url": checkpoint["remote"],
        "options": checkpoint["remote_options"],
        # The services' packages may include what the launcher's lack.
        "elsewhere": context.python is None,
    }
    python = context.find_interpreter("fsspec")
    module = "flotilla_launcher.doctor.adapters.checkpoint_store_probe"
    return await run_probe_module(python, module, question, context.environ, STORE_VARIABLES)


def _check_handed_keys(context: RunContext, url: str) -> list[Finding]:
    """Warn if machines get no credentials: a test with a credentials file of this machine
    proves little about them."""
    handed = any(context.environ.get(name) for name in _CREDENTIALS)
    if context.backend != "sky" or not url.startswith("s3") or handed:
        return []
    what = f"neither {' nor '.join(_CREDENTIALS)} is set, so that machines are handed no key"
    return [warn(what, "export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give them a role")]
