"""Whether checkpoints can be uploaded, read back and removed; and whether they are."""

from services.launcher.doctor.children import ask
from services.launcher.doctor.results import Finding, NotApplicableError, fail, warn
from services.launcher.doctor.subject import Subject
from services.launcher.runs import LEARNER, RunMode
from services.launcher.sky import candidates, offers

_LEAVE_OUT = (
    'to start without all the same, set launcher.skip_probes = ["store"], or --skip store for this'
    " command"
)


async def store(subject: Subject) -> list[Finding]:
    section = subject.section(LEARNER)
    checkpoint = section["checkpoint"]
    if checkpoint["remote"] is not None:
        question = {"url": checkpoint["remote"], "options": checkpoint["remote_options"]}
        return await ask(subject.interpreter(), "probes_store", question, subject.environ)
    config = subject.plan.config
    lost = offers.unkept(section, config)
    if subject.backend != "sky" or subject.mode is not RunMode.TRAIN or not lost:
        raise NotApplicableError(f"{offers.REMOTE} is not set: nothing is uploaded")
    # There a lost node costs nothing: homes are on a server.
    say = warn if candidates.on_slurm(config.sky, LEARNER) else fail
    return [say(lost, f"{offers.KEEP}; {_LEAVE_OUT}")]
