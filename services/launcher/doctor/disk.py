"""Probe of disk space: checkpoints fit on the disk, published weights into shared memory."""

from services.launcher.doctor import memory_estimate
from services.launcher.doctor.findings import Finding, fail, ok, warn
from services.launcher.doctor.machine_resources import measure_machine
from services.launcher.doctor.machine_sizes import list_capacities
from services.launcher.doctor.memory_estimate import format_gib
from services.launcher.doctor.policy_files import measure_policy
from services.launcher.doctor.run_context import RunContext
from services.launcher.state import LEARNER


async def probe_disk(context: RunContext) -> list[Finding]:
    model = await measure_policy(context)
    section, dtype = context.get_section(LEARNER), context.shared.policy.dtype
    kept = memory_estimate.checkpoint_bytes(model, dtype, section)
    alone = context.shared.policy.adapter_rank is not None
    shared = memory_estimate.weight_slot_bytes(model, dtype, section, adapters_alone=alone)
    keep = section["checkpoint"]["keep"]
    sizes = ok(
        f"checkpoints take {format_gib(kept)} ({keep} kept), weights in /dev/shm"
        f" {format_gib(shared)}"
    )
    if context.backend == "local":
        return [sizes, *await _check_here(context, kept, shared)]
    return [sizes, *_check_candidates(context, kept)]


async def _check_here(context: RunContext, kept: int, shared: int) -> list[Finding]:
    here = await measure_machine(context.folder)
    findings: list[Finding] = []
    if kept > here.disk:
        what = (
            f"checkpoints take {format_gib(kept)}, {format_gib(here.disk)} are free for"
            f" {context.folder}"
        )
        lower = "free some, give another folder by --runs, or lower learner.checkpoint.keep"
        findings.append(fail(what, lower))
    if shared > here.shared:
        what = (
            f"weights in /dev/shm take {format_gib(shared)}, {format_gib(here.shared)} are"
            " free there"
        )
        larger = f"mount -o remount,size={shared // 10**9 + 1}G /dev/shm (docker: --shm-size)"
        # Present contents may be gone by then; only what never fits is a fault.
        findings.append((fail if shared > here.shared_total else warn)(what, larger))
    return findings


def _check_candidates(context: RunContext, kept: int) -> list[Finding]:
    found = list(list_capacities(context.plan.config.sky, LEARNER, context.sky_home))
    small = [room for room in found if room.disk < kept]
    if not small:
        return []
    names = ", ".join(f"{room.name} ({format_gib(room.disk)})" for room in small)
    what = f"checkpoints take {format_gib(kept)}, too much for the disk of {names}"
    larger = "set disk_size in launcher.sky.learner, or lower learner.checkpoint.keep"
    return [(fail if len(small) == len(found) else warn)(what, larger)]
