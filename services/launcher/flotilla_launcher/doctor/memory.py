"""Probe of memory: the trainer, the engine and their overhead fit."""

import os
import shutil
from collections.abc import Iterator, Sequence

import psutil

from flotilla_launcher.backends.local.gpu_reservations import visible_gpus
from flotilla_launcher.backends.sky.machine_candidates import machines_of
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.doctor.findings import Finding, NotApplicableError, Status, fail, ok, warn
from flotilla_launcher.doctor.machine_sizes import MachineCapacity, list_capacities
from flotilla_launcher.doctor.memory_estimate import (
    EngineMemory,
    MemoryNeeds,
    TrainerMemory,
    describe_needs,
    estimate_engine,
    estimate_trainer,
    format_gib,
    weight_slot_bytes,
)
from flotilla_launcher.doctor.policy_files import measure_policy
from flotilla_launcher.doctor.probe_process import run_command
from flotilla_launcher.doctor.run_context import RunContext
from flotilla_launcher.state import LEARNER, ROLLOUT

_SMALLER = (
    "take a larger machine or a smaller policy, or lower learner.rank.pack_tokens,"
    " learner.rank.processes or rollout.engine.max_num_seqs"
)
_LESS_ENGINE = (
    "raise rollout.engine.tensor_parallel or gpu_memory_utilization, lower policy.max_model_len, or"
    " take GPUs with more memory"
)
_GPU_QUERY = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")


async def probe_memory(context: RunContext) -> list[Finding]:
    needs, config = await measure_needs(context), context.plan.config
    estimate = ok(describe_needs(needs))
    if context.gpus or context.backend != "local":
        return [estimate, *check_requested(context, needs)]
    gpus = await _list_gpu_memory()
    found = _check_here(needs, config.replica_counts()[ROLLOUT], gpus)
    return [estimate, *found, *_check_gpus(gpus, needs, config, "this machine")]


def check_requested(context: RunContext, needs: MemoryNeeds) -> Iterator[Finding]:
    """Check the machines that the spec requests, or the one that has the GPUs of --gpus."""
    if not context.gpus:
        return _check_candidates(context, needs)
    return _check_gpus(context.gpus, needs, context.plan.config, "the machine of --gpus")


async def measure_needs(context: RunContext) -> MemoryNeeds:
    """Return what a run needs. Raises FindingError, NotApplicableError."""
    if context.plan.uses_tinker:
        raise NotApplicableError("the weights are at the Tinker service, none are here")
    model = await measure_policy(context)
    learner, policy = context.get_section(LEARNER), context.shared.policy
    trainer = estimate_trainer(model, policy, learner)
    if ROLLOUT not in context.plan.services:
        # Nothing is published, so nothing is in shared memory.
        return MemoryNeeds(model.parameters, trainer, None, 0)
    rollout = context.get_section(ROLLOUT)
    if context.backend != "local" and not context.gpus:
        # An engine spans as many machines as its replica gets.
        nodes = max(
            rollout["engine"]["nodes"], machines_of(context.plan.config.sky, ROLLOUT).num_nodes
        )
        rollout = {**rollout, "engine": {**rollout["engine"], "nodes": nodes}}
    return MemoryNeeds(
        model.parameters,
        trainer,
        estimate_engine(model, policy, rollout),
        weight_slot_bytes(model, policy, learner),
    )


async def _list_gpu_memory() -> Sequence[int]:
    count = len(visible_gpus())
    if not count or shutil.which(_GPU_QUERY[0]) is None:
        return ()
    code, output, _ = await run_command(_GPU_QUERY, b"", os.environ)
    sizes = [int(line) * 2**20 for line in output.split() if line.isdecimal()]
    return sizes[:count] if code == 0 else ()


def _check_here(needs: MemoryNeeds, replicas: int, gpus: Sequence[int]) -> Iterator[Finding]:
    trainer, engine, memory = needs.trainer, needs.engine, psutil.virtual_memory()
    host = trainer.host + needs.shared + (replicas * engine.host if engine else 0)
    takes = f"the run takes {format_gib(host)} of memory"
    if host > memory.total:
        # An estimate may be wrong: only certain sizes refuse a run.
        judge = fail if host - trainer.host_estimate > memory.total else warn
        yield judge(f"{takes}, this machine has {format_gib(memory.total)}", _SMALLER)
    elif host > memory.available:
        free = format_gib(memory.available)
        yield warn(f"{takes}, {free} are free now", "end other processes here")
    keys = ["learner.rank.device"] if trainer.gpus else []
    keys += ["rollout.engine.device"] if engine and engine.gpus else []
    if keys and not gpus:
        cpu = 'set both to the CPU, or launch with launcher.backend = "sky"'
        yield fail(f"{' and '.join(keys)} require a GPU, and there is none here", cpu)


def _check_gpus(
    gpus: Sequence[int], needs: MemoryNeeds, config: LauncherConfig, where: str
) -> Iterator[Finding]:
    """Check the GPUs of one machine: their size, their number, and the launcher's assignment."""
    if not gpus:
        return
    smallest, there, name = min(gpus), len(gpus), f"a GPU of {where}"
    each, replicas = config.gpu_counts(), config.replica_counts()
    yield from check_trainer_gpu(needs.trainer, smallest, name)
    if needs.engine is not None:
        yield from check_engine_gpu(needs.engine, smallest, name)
    if not (each[LEARNER] or each[ROLLOUT]):
        yield from check_shared_gpu(needs, smallest, name)
    for service, part in _parts_of(needs).items():
        given = f"launcher.{service}.gpus gives" if each[service] else f"{where} has"
        yield from _check_number(service, part, each[service] or there, given)
    assigned = sum(each[service] * replicas[service] for service in _parts_of(needs))
    if assigned > there:
        what = f"launcher.SERVICE.gpus come to {assigned} for all replicas, {where} has {there}"
        yield fail(what, "lower them or launcher.rollout.replicas, or set them to 0 to share")


def _check_candidates(context: RunContext, needs: MemoryNeeds) -> Iterator[Finding]:
    """Check, for each service, that at least one of its candidates is large enough."""
    for service, part in _parts_of(needs).items():
        rooms = list_capacities(context.plan.config.sky, service, context.sky_home)
        judged = [list(_check_candidate(service, room, part)) for room in rooms]
        for finding in (finding for found in judged for finding in found):
            yield finding if all(judged) else Finding(Status.WARN, finding.detail)


def _parts_of(needs: MemoryNeeds) -> dict[str, TrainerMemory | EngineMemory]:
    """Return what each service with a policy needs."""
    engine = {} if needs.engine is None else {ROLLOUT: needs.engine}
    return {LEARNER: needs.trainer, **engine}


def _check_candidate(
    service: str, room: MachineCapacity, part: TrainerMemory | EngineMemory
) -> Iterator[Finding]:
    """Yield the shortages of one candidate; nothing if its size is unknown."""
    where = f"{service}: {room.name}"
    if room.memory and part.host > room.memory:
        what = f"{where} has {format_gib(room.memory)} of memory for {format_gib(part.host)}"
        yield fail(what, _SMALLER)
    if part.gpus and room.gpus == 0 and room.sized:
        yield fail(f"{where} has no GPU", f"name accelerators in launcher.sky.{service}")
    if room.gpus:
        yield from _check_number(service, part, room.gpus, f"{where} has")
    if room.gpu_memory and isinstance(part, TrainerMemory):
        yield from check_trainer_gpu(part, room.gpu_memory, where)
    if room.gpu_memory and isinstance(part, EngineMemory):
        yield from check_engine_gpu(part, room.gpu_memory, where)


def _check_number(
    service: str, part: TrainerMemory | EngineMemory, there: int, given: str
) -> Iterator[Finding]:
    if part.gpus > there:
        key = part.gpus_key
        what = f"{given} {there} GPU{'s' if there > 1 else ''} for {key} = {part.gpus}"
        yield fail(what, f"lower {key}, or give each replica of {service} more GPUs")


def check_trainer_gpu(trainer: TrainerMemory, size: int, where: str) -> Iterator[Finding]:
    """Yield a finding where a rank does not fit into a GPU of this size."""
    if trainer.device > size:
        what = f"{where} has {format_gib(size)} for the learner's {format_gib(trainer.device)}"
        savings = ", ".join(trainer.savings) or "a smaller learner.rank.head_chunk"
        fix = (
            f"set {savings}, split over more learner.rank.processes, lower policy.max_model_len, or"
            f" take GPUs of {format_gib(trainer.device)} or more"
        )
        yield (fail if trainer.device - trainer.activations > size else warn)(what, fix)


def check_engine_gpu(engine: EngineMemory, size: int, where: str) -> Iterator[Finding]:
    """Yield a finding where an engine has no room, or little, for sequences of full length."""
    if not engine.gpus:
        return
    room = engine.kv_cache_bytes(size)
    if room < engine.sequence:
        left = f"{format_gib(room)} for KV" if room > 0 else "nothing for KV"
        what = (
            f"{where} ({format_gib(size)}) leaves {left} beside {format_gib(engine.weights)} of"
            f" weights; one sequence of full length takes {format_gib(engine.sequence)}"
        )
        yield fail(what, _LESS_ENGINE)
    elif room < engine.sequence * min(4, engine.max_num_seqs):
        what = f"{where} holds KV of {room // engine.sequence} sequences of full length at once"
        yield warn(f"{what}, of {engine.max_num_seqs} allowed", _LESS_ENGINE)


def check_shared_gpu(needs: MemoryNeeds, size: int, where: str) -> Iterator[Finding]:
    """Yield a finding where a rank does not fit beside an engine, on the same GPU."""
    engine, trainer = needs.engine, needs.trainer
    if engine is None:
        return
    left = size - int(engine.share * size)
    # A rank that is too large alone gets another finding.
    if engine.gpus and left < trainer.device <= size:
        what = (
            f"{where} ({format_gib(size)}) is shared: an engine that takes"
            f" rollout.engine.gpu_memory_utilization = {engine.share:g} of it leaves"
            f" {format_gib(left)} for the learner's {format_gib(trainer.device)}"
        )
        fix = "lower it, or give each service GPUs of its own by launcher.SERVICE.gpus"
        yield (fail if trainer.device - trainer.activations > left else warn)(what, fix)
