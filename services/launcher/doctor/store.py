"""Whether checkpoints can be uploaded, read back and removed."""

from services.launcher.doctor.children import ask
from services.launcher.doctor.results import Finding, NotApplicableError
from services.launcher.doctor.subject import Subject
from services.launcher.runs import LEARNER


async def store(subject: Subject) -> list[Finding]:
    checkpoint = subject.section(LEARNER)["checkpoint"]
    if checkpoint["remote"] is None:
        raise NotApplicableError("learner.checkpoint.remote is not set: nothing is uploaded")
    question = {"url": checkpoint["remote"], "options": checkpoint["remote_options"]}
    return await ask(subject.interpreter(), "probes_store", question, subject.environ)
