"""Check of GPUs of one size: what fits, and which change would make the rest fit."""

from collections.abc import Iterator

from services.launcher.doctor.findings import Finding, fail, warn
from services.launcher.doctor.memory_changes import suggest_for_engine, suggest_for_trainer
from services.launcher.doctor.memory_estimate import format_gib
from services.launcher.doctor.memory_needs import MemoryNeeds

_LESS_ENGINE = (
    "raise rollout.engine.tensor_parallel or gpu_memory_utilization, lower policy.max_model_len, or"
    " take GPUs with more memory"
)


def check_trainer_gpu(needs: MemoryNeeds, size: int, where: str) -> Iterator[Finding]:
    """Yield a finding where a rank does not fit into a GPU of this size."""
    trainer = needs.trainer
    if trainer.device > size:
        what = f"{where} has {format_gib(size)} for the learner's {format_gib(trainer.device)}"
        # An estimate may be wrong: only certain sizes refuse a run.
        yield (fail if trainer.certain > size else warn)(what, suggest_for_trainer(needs, size))


def check_engine_gpu(needs: MemoryNeeds, size: int, where: str) -> Iterator[Finding]:
    """Yield a finding where an engine has no room, or little, for sequences of full length."""
    engine = needs.engine
    if not engine.uses_gpu:
        return
    room = engine.kv_cache_bytes(size)
    if room < engine.sequence:
        left = f"{format_gib(max(0, room))} for KV" if room > 0 else "nothing for KV"
        what = (
            f"{where} ({format_gib(size)}) leaves {left} beside {format_gib(engine.weights)}"
            " of weights; one"
            f" sequence of full length takes {format_gib(engine.sequence)}"
        )
        yield fail(what, suggest_for_engine(needs, size))
    elif room < engine.sequence * min(4, engine.max_num_seqs):
        what = f"{where} holds KV of {room // engine.sequence} sequences of full length at once"
        yield warn(f"{what}, of {engine.max_num_seqs} allowed", _LESS_ENGINE)


def check_shared_gpu(needs: MemoryNeeds, size: int, where: str) -> Iterator[Finding]:
    """Yield a finding where a rank does not fit beside an engine, on the same GPU."""
    engine, trainer = needs.engine, needs.trainer
    left = size - int(engine.share * size)
    # A rank that is too large alone gets another finding.
    if engine.uses_gpu and left < trainer.device <= size:
        what = (
            f"{where} ({format_gib(size)}) is shared: an engine that takes"
            f" rollout.engine.gpu_memory_utilization = {engine.share:g} of it leaves"
            f" {format_gib(left)} for the learner's {format_gib(trainer.device)}"
        )
        fix = "lower it, or give each service GPUs of its own by launcher.SERVICE.gpus"
        yield (fail if trainer.certain > left else warn)(what, fix)
