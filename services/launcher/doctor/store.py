"""Whether checkpoints can be uploaded, read back and removed; and whether they are."""

from services.launcher.backends.sky import cost_estimate, resources
from services.launcher.doctor.findings import Finding, NotApplicableError, fail, warn
from services.launcher.doctor.probe_process import ask
from services.launcher.doctor.run_context import Subject
from services.launcher.security.env_filter import STORE
from services.launcher.state import LEARNER, RunMode

# One of them, or a role of the machine, opens a bucket.
_CREDENTIALS = ("AWS_ACCESS_KEY_ID", "FLOTILLA_REMOTE_OPTIONS")
_LEAVE_OUT = (
    'to start without all the same, set launcher.skip_probes = ["store"], or --skip store for this'
    " command"
)


async def store(subject: Subject) -> list[Finding]:
    section = subject.section(LEARNER)
    checkpoint = section["checkpoint"]
    if checkpoint["remote"] is not None:
        question = {
            "url": checkpoint["remote"],
            "options": checkpoint["remote_options"],
            # What the launcher's own packages lack, those of the services may have.
            "elsewhere": subject.python is None,
        }
        python = subject.interpreter("fsspec")
        found = await ask(python, "store_probe", question, subject.environ, STORE)
        return [*found, *_only_here(subject, checkpoint["remote"])]
    config = subject.plan.config
    lost = cost_estimate.unkept(section, config)
    if subject.backend != "sky" or subject.mode is not RunMode.TRAIN or not lost:
        raise NotApplicableError(f"{cost_estimate.REMOTE} is not set: nothing is uploaded")
    # There a lost node costs nothing: homes are on a server.
    say = warn if resources.on_slurm(config.sky, LEARNER) else fail
    return [say(lost, f"{cost_estimate.KEEP}; {_LEAVE_OUT}")]


def _only_here(subject: Subject, url: str) -> list[Finding]:
    """Machines are handed variables: what was tried with a file of this one says little of them."""
    handed = any(subject.environ.get(name) for name in _CREDENTIALS)
    if subject.backend != "sky" or not url.startswith("s3") or handed:
        return []
    what = f"neither {' nor '.join(_CREDENTIALS)} is set, so that machines are handed no key"
    return [warn(what, "export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give them a role")]
