"""A rollout process that plays without an engine: each attempt ends without a grade, with the text
of a verifier that the spec gives; or with a template error."""

import asyncio
import contextlib

import grpc.aio

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla.learner.v1 import trajectory_pb2
from flotilla_common.process.run_membership import ReplicaStatus
from flotilla_common.process.service_main import Runtime, run_service_process
from flotilla_common.spec.config import ConfigModel
from flotilla_common.wire.registry import load_registry
from tests.support.learner import FakeWorker, failed


class Config(ConfigModel):
    """The verifier's text, or with `unrendered` the chat template's."""

    words: str
    unrendered: bool = False
    # Between two tries.
    delay_s: float = 0.02


class Ungraded(FakeWorker):
    """Submits attempts without a grade."""

    def __init__(self, channel: grpc.aio.Channel, config: Config) -> None:
        super().__init__("", channel=channel)
        self._config = config

    async def play(self, lease: pb.Lease) -> None:
        for attempt in lease.attempts:
            await asyncio.sleep(self._config.delay_s)
            if self._config.unrendered:
                one = failed(lease, attempt, trajectory_pb2.FAILURE_KIND_TEMPLATE_ERROR)
            else:
                one = failed(lease, attempt, trajectory_pb2.FAILURE_KIND_UNSPECIFIED)
                one.header.no_grade = trajectory_pb2.NO_GRADE_REASON_EXECUTION_FAILED
                one.header.stop_reason = trajectory_pb2.STOP_REASON_DONE
            one.header.detail = self._config.words
            if (await self.submit(one)).group_complete:
                return


async def serve(runtime: Runtime[Config]) -> None:
    runtime.report_status(lambda: ReplicaStatus("sampling", serving=True))
    await runtime.announce("127.0.0.1:9")
    channel = await runtime.peers.channel("learner")
    worker = Ungraded(channel, runtime.config)
    drained = asyncio.create_task(runtime.drain.wait())
    playing = asyncio.create_task(_play(worker))
    await asyncio.wait({drained, playing}, return_when=asyncio.FIRST_COMPLETED)
    playing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await playing


async def _play(worker: Ungraded) -> None:
    async with worker.working():
        await asyncio.Event().wait()


if __name__ == "__main__":
    run_service_process("rollout", Config, lambda: serve, doc=__doc__ or "", registry=load_registry)
