"""Probe of memory: the trainer, the engine and their overhead fit."""

from collections.abc import Iterator

from services.launcher.config.launcher import LauncherConfig
from services.launcher.doctor import memory_estimate
from services.launcher.doctor.findings import Finding, Status, fail, ok, warn
from services.launcher.doctor.machine_resources import MachineResources, measure_machine
from services.launcher.doctor.machine_sizes import MachineCapacity, list_capacities
from services.launcher.doctor.memory_estimate import EngineMemory, TrainerMemory, format_gib
from services.launcher.doctor.model_size import ModelSize
from services.launcher.doctor.policy_size import measure_policy
from services.launcher.doctor.run_context import RunContext
from services.launcher.state import LEARNER, ROLLOUT, SERVICES

_SMALLER = (
    "take a larger machine or a smaller policy, or lower learner.rank.pack_tokens,"
    " learner.rank.processes or rollout.engine.max_num_seqs"
)
_LESS_TRAINER = (
    "set learner.rank.shard, offload_optimizer or gradient_checkpointing, lower pack_tokens, or"
    " take GPUs with more memory"
)
_LESS_ENGINE = (
    "raise rollout.engine.tensor_parallel or gpu_memory_utilization, lower policy.max_model_len, or"
    " take GPUs with more memory"
)
# What says how many GPUs one machine of a service takes.
_GPUS_OF = {LEARNER: "learner.rank.processes", ROLLOUT: "rollout.engine.tensor_parallel"}


async def probe_memory(context: RunContext) -> list[Finding]:
    model = await measure_policy(context)
    if isinstance(model, Finding):
        return [model]
    policy = context.shared.policy
    trainer = memory_estimate.estimate_trainer(
        model, policy.dtype, policy.max_model_len, context.get_section(LEARNER)
    )
    engine = memory_estimate.estimate_engine(
        model, policy.dtype, policy.max_model_len, context.get_section(ROLLOUT)
    )
    estimate = ok(_format_needs(model, trainer, engine))
    if context.backend == "local":
        here = await measure_machine(context.folder)
        config, shared = context.plan.config, memory_estimate.weight_slot_bytes(model, policy.dtype)
        found = _check_here(here, trainer, engine, config.replica_counts()[ROLLOUT], shared)
        return [estimate, *found, *_check_gpus_here(here, trainer, engine, config)]
    return [estimate, *_check_candidates(context, trainer, engine)]


def _format_needs(model: ModelSize, trainer: TrainerMemory, engine: EngineMemory) -> str:
    near = (
        f"{format_gib(trainer.device)} a GPU"
        if trainer.device
        else f"{format_gib(trainer.host)} of memory"
    )
    engines = (
        f"{format_gib(engine.weights)} of weights and {format_gib(engine.sequence)} of"
        " KV a sequence"
    )
    return (
        f"{model.parameters / 1e9:.2f} B parameters; learner {near}"
        f" ({format_gib(trainer.estimated)} of it"
        f" estimated activations), rollout {engines} at up to {engine.max_num_seqs} sequences"
    )


def _check_here(
    here: MachineResources, trainer: TrainerMemory, engine: EngineMemory, replicas: int, shared: int
) -> Iterator[Finding]:
    host = trainer.host + replicas * engine.host + shared
    if host > here.memory:
        what = (
            f"the run takes {format_gib(host)} of memory, this machine has"
            f" {format_gib(here.memory)}"
        )
        # What is estimated may be wrong: only what is certain refuses a run.
        sure = host - (0 if trainer.device else trainer.estimated) > here.memory
        yield (fail if sure else warn)(what, _SMALLER)
    elif host > here.free_memory:
        what = (
            f"the run takes {format_gib(host)} of memory, {format_gib(here.free_memory)}"
            " are free now"
        )
        yield warn(what, "end what else runs here")
    if not (trainer.device or engine.uses_gpu):
        return
    if not here.gpus:
        keys = [k for k, gpu in _gpu_keys(trainer, engine) if gpu]
        cpu = 'set both to the CPU, or launch with launcher.backend = "sky"'
        yield fail(f"{' and '.join(keys)} ask for a GPU, and there is none here", cpu)
        return
    yield from check_gpu(trainer, engine, min(here.gpus), "a GPU of this machine")


def _check_gpus_here(
    here: MachineResources, trainer: TrainerMemory, engine: EngineMemory, config: LauncherConfig
) -> Iterator[Finding]:
    """Check that there are as many GPUs as the services need, and as the launcher is to assign."""
    there = len(here.gpus)
    if not there:
        return
    each, replicas = config.gpu_counts(), config.replica_counts()
    for service, wanted in ((LEARNER, trainer.gpus), (ROLLOUT, engine.gpus)):
        share = each[service] or there
        if wanted > share:
            given = f"launcher.{service}.gpus gives" if each[service] else "this machine has"
            yield _too_few_gpus(_gpus_key(service, engine), service, wanted, share, given)
    asked = sum(each[service] * replicas[service] for service in SERVICES)
    if asked > there:
        what = f"launcher.SERVICE.gpus come to {asked} for all replicas, this machine has {there}"
        yield fail(what, "lower them or launcher.rollout.replicas, or set them to 0 to share")


def _gpus_key(service: str, engine: EngineMemory) -> str:
    several = service == ROLLOUT and engine.engines > 1
    return _GPUS_OF[service] + (" * data_parallel" if several else "")


def _too_few_gpus(key: str, service: str, wanted: int, there: int, given: str) -> Finding:
    what = f"{given} {there} GPU{'s' if there > 1 else ''} for {key} = {wanted}"
    return fail(what, f"lower {key}, or give each replica of {service} more GPUs")


def _gpu_keys(trainer: TrainerMemory, engine: EngineMemory) -> list[tuple[str, bool]]:
    return [("learner.rank.device", trainer.device > 0), ("rollout.engine.device", engine.uses_gpu)]


def _check_candidates(
    context: RunContext, trainer: TrainerMemory, engine: EngineMemory
) -> Iterator[Finding]:
    """Check, for each service, that at least one of its candidates is large enough."""
    sky, home = context.plan.config.sky, context.sky_home
    for service in (LEARNER, ROLLOUT):
        judged = [
            list(_check_candidate(service, room, trainer, engine))
            for room in list_capacities(sky, service, home)
        ]
        small = [finding for found in judged for finding in found]
        if any(not found for found in judged):
            yield from (Finding(Status.WARN, found.detail) for found in small)
        else:
            yield from small


def _check_candidate(
    service: str, room: MachineCapacity, trainer: TrainerMemory, engine: EngineMemory
) -> Iterator[Finding]:
    """Yield what is too small about one candidate; nothing if its size is not known."""
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
        only = (trainer, None) if service == LEARNER else (None, engine)
        yield from check_gpu(*only, room.gpu_memory, where)


def check_gpu(
    trainer: TrainerMemory | None, engine: EngineMemory | None, size: int, where: str
) -> Iterator[Finding]:
    """Yield what does not fit into a GPU of this size."""
    if trainer is not None and trainer.device > size:
        what = f"{where} has {format_gib(size)} for the learner's {format_gib(trainer.device)}"
        yield (fail if trainer.certain > size else warn)(what, _LESS_TRAINER)
    if engine is None or not engine.uses_gpu:
        return
    room = engine.kv_cache_bytes(size)
    if room < engine.sequence:
        left = f"{format_gib(max(0, room))} for KV" if room > 0 else "nothing for KV"
        what = (
            f"{where} ({format_gib(size)}) leaves {left} beside {format_gib(engine.weights)}"
            " of weights; one"
            f" sequence of full length takes {format_gib(engine.sequence)}"
        )
        yield fail(what, _LESS_ENGINE)
    elif room < engine.sequence * min(4, engine.max_num_seqs):
        what = f"{where} holds KV of {room // engine.sequence} sequences of full length at once"
        yield warn(f"{what}, of {engine.max_num_seqs} allowed", _LESS_ENGINE)
