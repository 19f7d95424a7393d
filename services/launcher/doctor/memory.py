"""Whether the policy fits: the trainer, the engine, and what they need beside it."""

from collections.abc import Iterator

from services.launcher.config.launcher import LauncherConfig
from services.launcher.doctor import memory_estimate
from services.launcher.doctor.findings import Finding, Status, fail, ok, warn
from services.launcher.doctor.machine import Machine, this_machine
from services.launcher.doctor.machine_sizes import Room, rooms
from services.launcher.doctor.memory_estimate import Engine, Needs, gib
from services.launcher.doctor.model_size import Figures, NoFiguresError, figures
from services.launcher.doctor.policy import NoPolicyError, policy_folder, without
from services.launcher.doctor.run_context import Subject
from services.launcher.state import LEARNER, ROLLOUT, SERVICES

_SMALLER = (
    "take a larger machine or a smaller policy, or lower learner.rank.pack_tokens,"
    " learner.rank.processes or rollout.engine.max_num_seqs"
)
_LESS_TRAINER = (
    "set learner.rank.offload_optimizer or gradient_checkpointing, lower pack_tokens, or take GPUs"
    " with more memory"
)
_LESS_ENGINE = (
    "raise rollout.engine.tensor_parallel or gpu_memory_utilization, lower policy.max_model_len, or"
    " take GPUs with more memory"
)
# What says how many GPUs one machine of a service takes.
_GPUS_OF = {LEARNER: "learner.rank.processes", ROLLOUT: "rollout.engine.tensor_parallel"}


async def memory(subject: Subject) -> list[Finding]:
    try:
        model = figures(await policy_folder(subject))
    except NoPolicyError as error:
        return [without(subject, error)]
    except NoFiguresError as error:
        return [fail(str(error), "fetch the model again")]
    policy = subject.shared.policy
    trainer = memory_estimate.learner(
        model, policy.dtype, policy.max_model_len, subject.section(LEARNER)
    )
    engine = memory_estimate.engine(
        model, policy.dtype, policy.max_model_len, subject.section(ROLLOUT)
    )
    told = ok(_told(model, trainer, engine))
    if subject.backend == "local":
        here = await this_machine(subject.folder)
        config, shared = subject.plan.config, memory_estimate.shared_memory(model, policy.dtype)
        found = _here(here, trainer, engine, config.replicas()[ROLLOUT], shared)
        return [told, *found, *_gpus_here(here, trainer, engine, config)]
    return [told, *_elsewhere(subject, trainer, engine)]


def _told(model: Figures, trainer: Needs, engine: Engine) -> str:
    near = f"{gib(trainer.device)} a GPU" if trainer.device else f"{gib(trainer.host)} of memory"
    engines = f"{gib(engine.weights)} of weights and {gib(engine.sequence)} of KV a sequence"
    return (
        f"{model.parameters / 1e9:.2f} B parameters; learner {near} ({gib(trainer.estimated)} of it"
        f" estimated activations), rollout {engines} at up to {engine.max_num_seqs} sequences"
    )


def _here(
    here: Machine, trainer: Needs, engine: Engine, replicas: int, shared: int
) -> Iterator[Finding]:
    host = trainer.host + replicas * engine.host + shared
    if host > here.memory:
        what = f"the run takes {gib(host)} of memory, this machine has {gib(here.memory)}"
        # What is estimated may be wrong: only what is certain refuses a run.
        sure = host - (0 if trainer.device else trainer.estimated) > here.memory
        yield (fail if sure else warn)(what, _SMALLER)
    elif host > here.free_memory:
        what = f"the run takes {gib(host)} of memory, {gib(here.free_memory)} are free now"
        yield warn(what, "end what else runs here")
    if not (trainer.device or engine.gpu):
        return
    if not here.gpus:
        keys = [k for k, gpu in _gpu_keys(trainer, engine) if gpu]
        cpu = 'set both to the CPU, or launch with launcher.backend = "sky"'
        yield fail(f"{' and '.join(keys)} ask for a GPU, and there is none here", cpu)
        return
    yield from on_gpu(trainer, engine, min(here.gpus), "a GPU of this machine")


def _gpus_here(
    here: Machine, trainer: Needs, engine: Engine, config: LauncherConfig
) -> Iterator[Finding]:
    """Whether there are as many GPUs as the services want, and as the launcher is to hand out."""
    there = len(here.gpus)
    if not there:
        return
    each, replicas = config.gpus(), config.replicas()
    for service, wanted in ((LEARNER, trainer.gpus), (ROLLOUT, engine.gpus)):
        share = each[service] or there
        if wanted > share:
            given = f"launcher.{service}.gpus gives" if each[service] else "this machine has"
            yield _too_few(service, wanted, share, given)
    asked = sum(each[service] * replicas[service] for service in SERVICES)
    if asked > there:
        what = f"launcher.SERVICE.gpus come to {asked} for all replicas, this machine has {there}"
        yield fail(what, "lower them or launcher.rollout.replicas, or set them to 0 to share")


def _too_few(service: str, wanted: int, there: int, given: str) -> Finding:
    key = _GPUS_OF[service]
    what = f"{given} {there} GPU{'s' if there > 1 else ''} for {key} = {wanted}"
    return fail(what, f"lower {key}, or give each replica of {service} more GPUs")


def _gpu_keys(trainer: Needs, engine: Engine) -> list[tuple[str, bool]]:
    return [("learner.rank.device", trainer.device > 0), ("rollout.engine.device", engine.gpu)]


def _elsewhere(subject: Subject, trainer: Needs, engine: Engine) -> Iterator[Finding]:
    """Of each service, that at least one of its candidates is large enough."""
    sky, home = subject.plan.config.sky, subject.sky_home
    for service in (LEARNER, ROLLOUT):
        judged = [list(_fits(service, room, trainer, engine)) for room in rooms(sky, service, home)]
        small = [finding for found in judged for finding in found]
        if any(not found for found in judged):
            yield from (Finding(Status.WARN, found.detail) for found in small)
        else:
            yield from small


def _fits(service: str, room: Room, trainer: Needs, engine: Engine) -> Iterator[Finding]:
    """What is too small about one candidate; nothing where its size is not known."""
    host = trainer.host if service == LEARNER else engine.host
    wanted = trainer.gpus if service == LEARNER else engine.gpus
    where = f"{service}: {room.name}"
    if room.memory and host > room.memory:
        yield fail(f"{where} has {gib(room.memory)} of memory for {gib(host)}", _SMALLER)
    if wanted and room.gpus == 0 and room.sized:
        yield fail(f"{where} has no GPU", f"name accelerators in launcher.sky.{service}")
    if 0 < room.gpus < wanted:
        yield _too_few(service, wanted, room.gpus, f"{where} has")
    if wanted and room.gpu_memory:
        only = (trainer, None) if service == LEARNER else (None, engine)
        yield from on_gpu(*only, room.gpu_memory, where)


def on_gpu(
    trainer: Needs | None, engine: Engine | None, size: int, where: str
) -> Iterator[Finding]:
    """What does not fit into a GPU of this size."""
    if trainer is not None and trainer.device > size:
        what = f"{where} has {gib(size)} for the learner's {gib(trainer.device)}"
        yield (fail if trainer.certain > size else warn)(what, _LESS_TRAINER)
    if engine is None or not engine.gpu:
        return
    room = engine.room(size)
    if room < engine.sequence:
        left = f"{gib(max(0, room))} for KV" if room > 0 else "nothing for KV"
        what = (
            f"{where} ({gib(size)}) leaves {left} beside {gib(engine.weights)} of weights; one"
            f" sequence of full length takes {gib(engine.sequence)}"
        )
        yield fail(what, _LESS_ENGINE)
    elif room < engine.sequence * min(4, engine.max_num_seqs):
        what = f"{where} holds KV of {room // engine.sequence} sequences of full length at once"
        yield warn(f"{what}, of {engine.max_num_seqs} allowed", _LESS_ENGINE)
