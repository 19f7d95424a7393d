"""A learner process whose ranks hold no tensors; everything else is as in a run."""

from collections.abc import Awaitable, Callable

from services.common.service_main import RegistryContract, Runtime, entry
from services.learner.alarms.adapters.sinks import alarm_sinks_of
from services.learner.app import run_learner
from services.learner.config.learner import LearnerConfig
from services.learner.dependencies import Vendors
from services.learner.ranks.fake import FakeRanks
from services.learner.tracking.adapters.jsonl import JsonlTracker
from tests.learner.support import TOKENIZER


def load() -> Callable[[Runtime[LearnerConfig]], Awaitable[None]]:
    return serve


async def serve(runtime: Runtime[LearnerConfig]) -> None:
    run_dir = runtime.run_dir
    sinks = alarm_sinks_of(runtime.config.alarms, runtime.run_id, run_dir)
    tracker = JsonlTracker(run_dir / "metrics.jsonl")
    vendors = Vendors(FakeRanks(run_dir / "weights"), tracker, TOKENIZER, alarm_sinks=sinks)
    try:
        await run_learner(runtime, vendors)
    finally:
        tracker.close()
        for sink in sinks:
            sink.close()


def registry() -> RegistryContract:
    from flotilla.launcher.v1 import registry_service_pb2, registry_service_pb2_grpc

    return RegistryContract(registry_service_pb2_grpc.RegistryServiceStub, registry_service_pb2)


if __name__ == "__main__":
    entry("learner", LearnerConfig, load, doc=__doc__ or "", registry=registry)
