"""Probe of disk space: checkpoints fit on the disk, published weights into shared memory."""

import asyncio
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flotilla_common.spec.spec import PolicyConfig
from flotilla_common.weights.shared_memory import SHARED_MEMORY
from flotilla_launcher.doctor.findings import Finding, NotApplicableError, fail, ok, warn
from flotilla_launcher.doctor.machine_sizes import list_capacities
from flotilla_launcher.doctor.memory_estimate import (
    estimate_trainer,
    format_gib,
    item_bytes,
    weight_slot_bytes,
)
from flotilla_launcher.doctor.model_size import ModelSize
from flotilla_launcher.doctor.policy_files import measure_policy
from flotilla_launcher.doctor.run_context import RunContext
from flotilla_launcher.state import LEARNER, ROLLOUT


async def probe_disk(context: RunContext) -> list[Finding]:
    if context.plan.uses_tinker:
        raise NotApplicableError("checkpoints are at the Tinker service, here only their addresses")
    model = await measure_policy(context)
    section, policy = context.get_section(LEARNER), context.shared.policy
    kept = checkpoint_bytes(model, policy, section)
    # Without an engine, nothing is published.
    shared = weight_slot_bytes(model, policy, section) if ROLLOUT in context.plan.services else 0
    keep = section["checkpoint"]["keep"]
    sizes = ok(
        f"checkpoints take {format_gib(kept)} ({keep} kept), weights in /dev/shm"
        f" {format_gib(shared)}"
    )
    if context.backend == "local":
        return [sizes, *await asyncio.to_thread(_check_here, context.folder, kept, shared)]
    return [sizes, *_check_candidates(context, kept)]


def checkpoint_bytes(model: ModelSize, policy: PolicyConfig, learner: Mapping[str, Any]) -> int:
    """Return the bytes of the checkpoints that are kept, the one being written, and the final
    model."""
    each = estimate_trainer(model, policy, learner).copied
    return (learner["checkpoint"]["keep"] + 1) * each + model.parameters * item_bytes(policy.dtype)


def _check_here(folder: Path, kept: int, shared: int) -> list[Finding]:
    findings: list[Finding] = []
    absolute = folder.absolute()
    there = next(path for path in (absolute, *absolute.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if kept > free:
        what = f"checkpoints take {format_gib(kept)}, {format_gib(free)} are free for {folder}"
        lower = "free some, give another folder by --runs, or lower learner.checkpoint.keep"
        findings.append(fail(what, lower))
    if SHARED_MEMORY.is_dir():
        usage = shutil.disk_usage(SHARED_MEMORY)
        free, total = usage.free, usage.total
    else:
        free = total = 0
    if shared > free:
        what = f"weights in /dev/shm take {format_gib(shared)}, {format_gib(free)} are free there"
        larger = f"mount -o remount,size={shared // 10**9 + 1}G /dev/shm (docker: --shm-size)"
        # Present contents may be gone by then; only what never fits is a fault.
        findings.append((fail if shared > total else warn)(what, larger))
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
