"""Whether checkpoints fit on the disk, and published weights into shared memory."""

from services.launcher.doctor import memory_estimate
from services.launcher.doctor.findings import Finding, fail, ok, warn
from services.launcher.doctor.machine import this_machine
from services.launcher.doctor.machine_sizes import rooms
from services.launcher.doctor.memory_estimate import gib
from services.launcher.doctor.model_size import NoFiguresError, figures
from services.launcher.doctor.policy import NoPolicyError, policy_folder, without
from services.launcher.doctor.run_context import Subject
from services.launcher.state import LEARNER


async def disk(subject: Subject) -> list[Finding]:
    try:
        model = figures(await policy_folder(subject))
    except NoPolicyError as error:
        return [without(subject, error)]
    except NoFiguresError as error:
        return [fail(str(error), "fetch the model again")]
    section, dtype = subject.section(LEARNER), subject.shared.policy.dtype
    kept = memory_estimate.checkpoints(model, dtype, section)
    shared = memory_estimate.shared_memory(model, dtype)
    keep = section["checkpoint"]["keep"]
    told = ok(f"checkpoints take {gib(kept)} ({keep} kept), weights in /dev/shm {gib(shared)}")
    if subject.backend == "local":
        return [told, *await _here(subject, kept, shared)]
    return [told, *_elsewhere(subject, kept)]


async def _here(subject: Subject, kept: int, shared: int) -> list[Finding]:
    here = await this_machine(subject.folder)
    findings: list[Finding] = []
    if kept > here.disk:
        what = f"checkpoints take {gib(kept)}, {gib(here.disk)} are free for {subject.folder}"
        lower = "free some, give another folder by --runs, or lower learner.checkpoint.keep"
        findings.append(fail(what, lower))
    if shared > here.shared:
        what = f"weights in /dev/shm take {gib(shared)}, {gib(here.shared)} are free there"
        larger = f"mount -o remount,size={shared // 10**9 + 1}G /dev/shm (docker: --shm-size)"
        # What fills it now may be gone by then; what never fits is a fault.
        findings.append((fail if shared > here.shared_total else warn)(what, larger))
    return findings


def _elsewhere(subject: Subject, kept: int) -> list[Finding]:
    found = list(rooms(subject.plan.config.sky, LEARNER, subject.sky_home))
    small = [room for room in found if room.disk < kept]
    if not small:
        return []
    names = ", ".join(f"{room.name} ({gib(room.disk)})" for room in small)
    what = f"checkpoints take {gib(kept)}, too much for the disk of {names}"
    larger = "set disk_size in launcher.sky.learner, or lower learner.checkpoint.keep"
    return [(fail if len(small) == len(found) else warn)(what, larger)]
