"""Probe of memory: the trainer, the engine and their overhead fit."""

from collections.abc import Iterator, Sequence

from services.launcher.backends.sky.machine_candidates import machines_of
from services.launcher.config.launcher import LauncherConfig
from services.launcher.doctor.findings import Finding, Status, fail, ok, warn
from services.launcher.doctor.gpu_room import (
    check_engine_gpu,
    check_shared_gpu,
    check_trainer_gpu,
)
from services.launcher.doctor.machine_resources import MachineResources, measure_machine
from services.launcher.doctor.machine_sizes import MachineCapacity, list_capacities
from services.launcher.doctor.memory_estimate import EngineMemory, format_gib
from services.launcher.doctor.memory_needs import MemoryNeeds
from services.launcher.doctor.policy_files import measure_policy
from services.launcher.doctor.run_context import RunContext
from services.launcher.state import LEARNER, ROLLOUT, SERVICES

_SMALLER = (
    "take a larger machine or a smaller policy, or lower learner.rank.pack_tokens,"
    " learner.rank.processes or rollout.engine.max_num_seqs"
)
# Key that sets the number of GPUs of one machine of a service.
_GPUS_OF = {LEARNER: "learner.rank.processes", ROLLOUT: "rollout.engine.tensor_parallel"}


async def probe_memory(context: RunContext) -> list[Finding]:
    needs = await measure_needs(context)
    estimate, config = ok(needs.describe()), context.plan.config
    if context.gpus:
        return [estimate, *check_gpus(context.gpus, needs, config, "the machine of --gpus")]
    if context.backend == "local":
        here = await measure_machine(context.folder)
        found = _check_here(here, needs, config.replica_counts()[ROLLOUT])
        gpus = check_gpus(here.gpus, needs, config, "this machine")
        return [estimate, *found, *gpus]
    return [estimate, *check_candidates(context, needs)]


async def measure_needs(context: RunContext) -> MemoryNeeds:
    """Return what a run needs. Raises FindingError, NotApplicableError."""
    model = await measure_policy(context)
    sections = context.get_section(LEARNER), context.get_section(ROLLOUT)
    return MemoryNeeds.from_spec(model, context.shared.policy, *sections)


def _check_here(here: MachineResources, needs: MemoryNeeds, replicas: int) -> Iterator[Finding]:
    trainer, engine = needs.trainer, needs.engine
    host = trainer.host + replicas * engine.host + needs.shared
    if host > here.memory:
        what = (
            f"the run takes {format_gib(host)} of memory, this machine has"
            f" {format_gib(here.memory)}"
        )
        # An estimate may be wrong: only certain sizes refuse a run.
        sure = host - (0 if trainer.device else trainer.estimated) > here.memory
        yield (fail if sure else warn)(what, _SMALLER)
    elif host > here.free_memory:
        what = (
            f"the run takes {format_gib(host)} of memory, {format_gib(here.free_memory)}"
            " are free now"
        )
        yield warn(what, "end other processes here")
    if (trainer.device or engine.uses_gpu) and not here.gpus:
        keys = ["learner.rank.device"] if trainer.device else []
        keys += ["rollout.engine.device"] if engine.uses_gpu else []
        cpu = 'set both to the CPU, or launch with launcher.backend = "sky"'
        yield fail(f"{' and '.join(keys)} require a GPU, and there is none here", cpu)


def check_gpus(
    gpus: Sequence[int], needs: MemoryNeeds, config: LauncherConfig, where: str
) -> Iterator[Finding]:
    """Check the GPUs of one machine: their size, their number, and the launcher's assignment."""
    if not gpus:
        return
    smallest, name = min(gpus), f"a GPU of {where}"
    each, replicas = config.gpu_counts(), config.replica_counts()
    yield from check_trainer_gpu(needs, smallest, name)
    yield from check_engine_gpu(needs, smallest, name)
    if not (each[LEARNER] or each[ROLLOUT]):
        yield from check_shared_gpu(needs, smallest, name)
    there, engine = len(gpus), needs.engine
    for service, wanted in ((LEARNER, needs.trainer.gpus), (ROLLOUT, engine.gpus)):
        share = each[service] or there
        if wanted > share:
            given = f"launcher.{service}.gpus gives" if each[service] else f"{where} has"
            yield _too_few_gpus(_gpus_key(service, engine), service, wanted, share, given)
    assigned = sum(each[service] * replicas[service] for service in SERVICES)
    if assigned > there:
        what = f"launcher.SERVICE.gpus come to {assigned} for all replicas, {where} has {there}"
        yield fail(what, "lower them or launcher.rollout.replicas, or set them to 0 to share")


def _gpus_key(service: str, engine: EngineMemory) -> str:
    key = _GPUS_OF[service]
    if service == ROLLOUT and engine.engines > 1:
        return f"{key} * data_parallel"
    return f"{key} / nodes" if service == ROLLOUT and engine.machines > 1 else key


def _too_few_gpus(key: str, service: str, wanted: int, there: int, given: str) -> Finding:
    what = f"{given} {there} GPU{'s' if there > 1 else ''} for {key} = {wanted}"
    return fail(what, f"lower {key}, or give each replica of {service} more GPUs")


def check_candidates(context: RunContext, needs: MemoryNeeds) -> Iterator[Finding]:
    """Check, for each service, that at least one of its candidates is large enough."""
    sky, home = context.plan.config.sky, context.sky_home
    # An engine spans as many machines as its replica gets.
    if (machines := machines_of(sky, ROLLOUT).num_nodes) > 1:
        needs = needs.with_engine(nodes=machines)
    for service in (LEARNER, ROLLOUT):
        judged = [
            list(_check_candidate(service, room, needs))
            for room in list_capacities(sky, service, home)
        ]
        small = [finding for found in judged for finding in found]
        if any(not found for found in judged):
            yield from (Finding(Status.WARN, found.detail) for found in small)
        else:
            yield from small


def _check_candidate(service: str, room: MachineCapacity, needs: MemoryNeeds) -> Iterator[Finding]:
    """Yield the shortages of one candidate; nothing if its size is unknown."""
    trainer, engine = needs.trainer, needs.engine
    host = trainer.host if service == LEARNER else engine.host
    wanted = trainer.gpus if service == LEARNER else engine.gpus
    where = f"{service}: {room.name}"
    if room.memory and host > room.memory:
        yield fail(
            f"{where} has {format_gib(room.memory)} of memory for {format_gib(host)}", _SMALLER
        )
    if wanted and room.gpus == 0 and room.sized:
        yield fail(f"{where} has no GPU", f"name accelerators in launcher.sky.{service}")
    if 0 < room.gpus < wanted:
        key = _gpus_key(service, engine)
        yield _too_few_gpus(key, service, wanted, room.gpus, f"{where} has")
    if wanted and room.gpu_memory:
        check = check_trainer_gpu if service == LEARNER else check_engine_gpu
        yield from check(needs, room.gpu_memory, where)
