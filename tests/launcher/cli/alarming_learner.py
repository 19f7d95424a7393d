"""A learner process whose ranks hold no tensors; everything else is as in a run."""

from collections.abc import Awaitable, Callable

from flotilla_common.process.service_main import Runtime, run_service_process
from flotilla_common.weights.fingerprint import TokenizerDigests
from flotilla_common.wire.registry import load_registry
from flotilla_learner.alarms.adapters.jsonl_sink import JsonlAlarmSink
from flotilla_learner.app import run_learner
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.dependencies import LearnerDependencies
from flotilla_learner.tracking.adapters.jsonl import JsonlTracker
from tests.support.fake_ranks import FakeRanks
from tests.support.learner import TOKENIZER


def load() -> Callable[[Runtime[LearnerConfig]], Awaitable[None]]:
    return serve


async def serve(runtime: Runtime[LearnerConfig]) -> None:
    run_dir = runtime.run_dir
    sinks = [JsonlAlarmSink(run_dir / "alarms.jsonl", runtime.run_id)]
    tracker = JsonlTracker(run_dir / "metrics.jsonl")
    vendors = LearnerDependencies(
        FakeRanks(run_dir / "weights"), tracker, TokenizerDigests(TOKENIZER), alarm_sinks=sinks
    )
    try:
        await run_learner(runtime, vendors)
    finally:
        tracker.close()


if __name__ == "__main__":
    run_service_process("learner", LearnerConfig, load, doc=__doc__ or "", registry=load_registry)
