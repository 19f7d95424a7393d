"""Membership in a run, and finding peers, against a registry over a real socket."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest

from flotilla.launcher.v1 import alarm_pb2 as alarm_pb
from flotilla.launcher.v1 import registry_service_pb2 as pb
from flotilla.launcher.v1 import registry_service_pb2_grpc as pb_grpc
from flotilla_common.process.run_membership import (
    Membership,
    RaisedAlarm,
    ReplicaIdentity,
    ReplicaStatus,
)
from flotilla_common.rpc import rpc
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.peer_channels import Peers
from flotilla_common.wire.registry import load_registry
from tests.common.registry import FakeRegistry, refusal
from tests.support import echo_service
from tests.support.waiting import until


@dataclass
class ObservedReplica:
    """One replica under test and the commands of its membership."""

    registry: FakeRegistry
    status: ReplicaStatus = field(default_factory=ReplicaStatus)
    drained: list[str] = field(default_factory=list[str])
    stopped: list[str] = field(default_factory=list[str])
    metrics: list[Mapping[str, float]] = field(default_factory=list[Mapping[str, float]])
    membership: Membership | None = None


@asynccontextmanager
async def registry_server() -> AsyncGenerator[tuple[FakeRegistry, grpc.aio.Channel]]:
    fake, server = FakeRegistry(), rpc.server(token=echo_service.TOKEN)
    pb_grpc.add_RegistryServiceServicer_to_server(fake, server)
    async with (
        rpc.serving(server, "127.0.0.1:0", grace_s=0) as serving,
        rpc.channel(serving.address, token=echo_service.TOKEN) as channel,
    ):
        yield fake, channel


@asynccontextmanager
async def member() -> AsyncGenerator[ObservedReplica]:
    async with registry_server() as (fake, channel):
        one = ObservedReplica(fake)
        membership = one.membership = Membership(
            ReplicaIdentity("run", "rollout", 1, "i1"),
            load_registry(),
            channel,
            status=lambda: one.status,
            drain=one.drained.append,
            stop=one.stopped.append,
            on_metrics=one.metrics.append,
        )
        task = asyncio.create_task(membership.run("127.0.0.1:7"))
        yield one
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_member_registers_once_and_reports_its_status() -> None:
    async with member() as one:
        one.status = ReplicaStatus("training", True, 3, 9, {"loss": 0.5})
        await until(lambda: any(beat.step == 3 for beat in one.registry.heartbeats))
        (registered,) = one.registry.registered
        assert (registered.service, registered.replica) == ("rollout", 1)
        assert (registered.address, registered.incarnation) == ("127.0.0.1:7", "i1")
        beat = one.registry.heartbeats[-1]
        assert (beat.phase, beat.serving, beat.total_steps) == ("training", True, 9)
        assert dict(beat.metrics) == {"loss": 0.5}


async def test_a_member_in_a_hurry_reports_its_alarms_without_waiting_for_its_turn() -> None:
    async with member() as one:
        one.registry.interval_s = 60
        await until(lambda: len(one.registry.heartbeats) > 0)
        assert one.membership is not None
        for number in (1, 2):
            alarm = RaisedAlarm("solved", f"env{number}", "notice", number, "why", "how")
            one.status = ReplicaStatus(alarms=[alarm])
            one.membership.hurry_heartbeat()
            await until(lambda before=number: len(one.registry.heartbeats) > before)
            (sent,) = one.registry.heartbeats[-1].alarms
            assert (sent.scope, sent.severity) == (f"env{number}", alarm_pb.ALARM_SEVERITY_NOTICE)
            assert (sent.step, sent.cause, sent.fix) == (number, "why", "how")


async def test_the_launchers_word_drains_and_heartbeats_continue() -> None:
    async with member() as one:
        one.registry.command = pb.COMMAND_DRAIN
        await until(lambda: bool(one.drained))
        beats = len(one.registry.heartbeats)
        await until(lambda: len(one.registry.heartbeats) > beats + 2)
        assert one.stopped == []


async def test_a_member_hears_what_the_launcher_knows_of_the_run() -> None:
    async with member() as one:
        one.registry.metrics = {"cost/accrued": 1.5}
        await until(lambda: bool(one.metrics))
        assert one.metrics[-1] == {"cost/accrued": 1.5}


async def test_the_launchers_word_stops() -> None:
    async with member() as one:
        one.registry.command = pb.COMMAND_STOP
        await until(lambda: one.stopped == ["the launcher ordered a stop"])


async def test_a_replaced_member_stops() -> None:
    async with member() as one:
        one.registry.failure = refusal("REPLACED")
        await until(lambda: one.stopped == ["another process has taken this replica's place"])


async def test_a_launcher_that_forgot_a_member_is_notified_again() -> None:
    async with member() as one:
        await until(lambda: len(one.registry.heartbeats) > 0)
        one.registry.failure = refusal("UNKNOWN_RUN")
        await until(lambda: len(one.registry.registered) > 1)
        one.registry.failure = None
        beats = len(one.registry.heartbeats)
        await until(lambda: len(one.registry.heartbeats) > beats)
        assert one.stopped == []


async def test_a_member_without_a_launcher_drains_by_itself_once() -> None:
    async with member() as one:
        await until(lambda: len(one.registry.heartbeats) > 0)
        one.registry.failure = refusal("BROKEN")
        await until(lambda: bool(one.drained))
        await asyncio.sleep(0.2)
        assert len(one.drained) == 1
        assert "launcher silent for" in one.drained[0]


async def echo_server(stack: AsyncExitStack, name: str) -> str:
    async def answer(
        request: echo_service.StringValue, context: object
    ) -> echo_service.StringValue:
        return echo_service.StringValue(value=name)

    server = rpc.server(token=echo_service.TOKEN)
    echo_service.add(server, Echo=answer)
    serving = await stack.enter_async_context(rpc.serving(server, "127.0.0.1:0", grace_s=0))
    return serving.address


async def test_a_stub_follows_a_peer_to_its_new_address() -> None:
    async with registry_server() as (fake, registry), AsyncExitStack() as stack:
        peers = Peers(
            token=echo_service.TOKEN,
            run_id="run",
            registry=load_registry(),
            registry_channel=registry,
        )
        waiting = asyncio.create_task(peers.channel("learner"))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        fake.move({0: await echo_server(stack, "first")})
        channel = await asyncio.wait_for(waiting, 3)
        echo = echo_service.method(channel, "Echo")
        assert (await echo(echo_service.StringValue())).value == "first"
        fake.move({})
        await asyncio.sleep(0.1)
        assert (await echo(echo_service.StringValue())).value == "first"
        fake.move({0: await echo_server(stack, "second")})
        answers = [(await echo(echo_service.StringValue())).value]
        while answers[-1] != "second" and len(answers) < 300:
            await asyncio.sleep(0.01)
            answers.append((await echo(echo_service.StringValue())).value)
        assert answers[-1] == "second"
        await peers.close()


async def test_replicas_are_shared_out_and_kept_while_they_last() -> None:
    async with registry_server() as (fake, registry), AsyncExitStack() as stack:
        addresses = {i: await echo_server(stack, f"gateway-{i}") for i in (0, 1)}
        fake.move(addresses)
        answers: list[str] = []
        for replica in (0, 1, 2):
            peers = Peers(
                token=echo_service.TOKEN,
                run_id="run",
                replica=replica,
                registry=load_registry(),
                registry_channel=registry,
            )
            channel = await peers.channel("env_gateway")
            answers.append(await echo_service.call(channel, "?"))
            await peers.close()
        assert answers == ["gateway-0", "gateway-1", "gateway-0"]


async def test_a_fixed_peer_needs_no_registry() -> None:
    async with AsyncExitStack() as stack:
        address = await echo_server(stack, "fixed")
        peers = Peers(token=echo_service.TOKEN, run_id="run", fixed={"learner": address})
        assert await echo_service.call(await peers.channel("learner"), "?") == "fixed"
        with pytest.raises(ConfigError, match="--peer env_gateway=HOST:PORT"):
            await peers.channel("env_gateway")
        await peers.close()
