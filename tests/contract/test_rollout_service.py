"""RolloutService with a real client over a real socket, on a fake engine and environment."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from flotilla.rollout.v1 import rollout_service_pb2 as pb
from flotilla.rollout.v1 import rollout_service_pb2_grpc
from flotilla_common.rpc import rpc
from flotilla_rollout.adapters.fake import FakeEngine
from flotilla_rollout.api.rollout_service import RolloutService
from flotilla_rollout.episodes.episode import AttemptRunner
from flotilla_rollout.work.burn_in import BurnIn
from flotilla_rollout.work.options import WorkerOptions
from flotilla_rollout.work.service_use import ServiceUse
from flotilla_rollout.work.weight_updater import WeightUpdater
from flotilla_rollout.work.worker import Worker
from tests.support.fake_peers import TOKEN
from tests.support.rollout import POLICY, FakeEnvironment, dialect, engine, limits, tokenizer, turns

LOOK = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'


class RolloutClient:
    def __init__(self, channel: grpc.aio.Channel, engine: FakeEngine, drain: asyncio.Event) -> None:
        self.stub: Any = rollout_service_pb2_grpc.RolloutServiceStub(channel)
        self.engine = engine
        self.drain = drain

    async def sample(self, **fields: Any) -> list[pb.SampleGroupResponse]:
        given: dict[str, Any] = {"task_json": '{"key": "t"}'} | fields
        request = pb.SampleGroupRequest(**given)
        return [event async for event in self.stub.SampleGroup(request)]


@asynccontextmanager
async def client(
    environment: FakeEnvironment | None = None, use: ServiceUse | None = None
) -> AsyncGenerator[RolloutClient]:
    fake = engine(turns(LOOK, "<done>"))
    drain = asyncio.Event()
    runner = AttemptRunner(fake, environment or FakeEnvironment(), tokenizer(), dialect(), limits())
    unused: Any = None
    service = RolloutService(
        "rollout-0",
        Worker(unused, runner, lambda: fake.policy, WorkerOptions(4, 1.0, 0.1, 5.0)),
        WeightUpdater(unused, fake, Path("unused")),
        BurnIn(fake, None, unused, unused, unused),
        runner,
        lambda: fake.policy,
        drain,
        5.0,
        use,
    )
    server = rpc.server(token=TOKEN)
    rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server(service, server)
    async with (
        rpc.serving(server, "127.0.0.1:0", grace_s=0.0) as serving,
        rpc.channel(serving.address, token=TOKEN) as channel,
    ):
        yield RolloutClient(channel, fake, drain)


def kinds(events: list[pb.SampleGroupResponse], index: int = 0) -> list[str | None]:
    return [e.WhichOneof("event") for e in events if e.attempt_index == index]


async def test_what_is_used_of_a_service_is_told_and_so_is_a_wait_for_it() -> None:
    use = ServiceUse()
    use.note_answer(prompt_tokens=10, sampled_tokens=3)
    async with client(use=use) as it:
        status = await it.stub.GetStatus(pb.GetStatusRequest())
        assert status.phase == "sampling"
        assert status.metrics["tokens/prompt_total"] == 10.0
        assert status.metrics["tokens/sampled_total"] == 3.0
        assert status.metrics["service/waiting_seconds"] == 0.0
        use.note_state("it is away", asyncio.get_running_loop().time() - 60.0)
        status = await it.stub.GetStatus(pb.GetStatusRequest())
        assert status.phase == "waiting"
        assert 60.0 <= status.metrics["service/waiting_seconds"] < 120.0
    async with client() as it:
        status = await it.stub.GetStatus(pb.GetStatusRequest())
        assert not [name for name in status.metrics if name.startswith(("tokens/", "service/"))]


async def test_a_group_is_sampled_turn_by_turn() -> None:
    async with client() as it:
        events = await it.sample(attempts=2, temperature=1.0)
        expected = ["prompt", "completion", "observation", "completion", "end"]
        assert kinds(events, 0) == kinds(events, 1) == expected
        end = next(event.end for event in events if event.HasField("end"))
        assert (end.reason, end.reward) == ("done", 1.0)


async def test_an_environment_that_is_lost_ends_the_attempt_with_the_reason() -> None:
    async with client(FakeEnvironment(lost="no room")) as it:
        (event,) = await it.sample()
        assert (event.end.reason, event.end.detail) == ("env_lost", "no room")
        assert not event.end.HasField("reward")


@pytest.mark.parametrize(
    "fields", [{"task_json": "{"}, {"task_json": "[]"}, {"attempts": 65}, {"task_json": "[" * 9999}]
)
async def test_a_bad_task_is_refused(fields: dict[str, Any]) -> None:
    async with client() as it:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await it.sample(**fields)
        error = rpc.service_error(refused.value)
        assert error is not None
        assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "BAD_TASK")


async def test_nothing_is_sampled_before_weights_are_loaded() -> None:
    async with client() as it:
        it.engine.policy = None
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await it.sample()
        error = rpc.service_error(refused.value)
        assert error is not None
        assert error.reason == "NO_POLICY"


async def test_status_shows_what_is_served() -> None:
    async with client() as it:
        status = await it.stub.GetStatus(pb.GetStatusRequest())
        assert (status.phase, status.worker_id) == ("sampling", "rollout-0")
        assert status.policy.version == POLICY.version


async def test_a_drain_is_repeatable() -> None:
    async with client() as it:
        await it.stub.Drain(pb.DrainRequest())
        await it.stub.Drain(pb.DrainRequest())
        assert it.drain.is_set()
        assert (await it.stub.GetStatus(pb.GetStatusRequest())).phase == "draining"
