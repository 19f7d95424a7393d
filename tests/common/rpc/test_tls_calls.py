"""Calls under TLS: accepted peers, and the errors for all others."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from flotilla.launcher.v1 import registry_service_pb2_grpc as pb_grpc
from flotilla_common.process.run_membership import Membership, ReplicaIdentity, ReplicaStatus
from flotilla_common.rpc import rpc
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.peer_channels import Peers
from flotilla_common.rpc.tls import Tls, likely_cause
from flotilla_common.wire.registry import load_registry
from tests.common.registry import FakeRegistry
from tests.support import echo_service
from tests.support.outsiders import RUN, beyond_loopback, other_run, run
from tests.support.waiting import until


@asynccontextmanager
async def echo_at(host: str, service: str | None) -> AsyncGenerator[str]:
    server = rpc.server(token=echo_service.TOKEN)
    echo_service.add(server)
    tls = run().tls_for(service) if service else None
    async with rpc.serving(server, f"{host}:0", tls=tls, grace_s=0.0) as serving:
        yield serving.address


async def test_all_kinds_of_calls_work_under_tls() -> None:
    async with (
        echo_at(beyond_loopback(), "env_gateway") as address,
        rpc.channel(
            address, token=echo_service.TOKEN, tls=run().tls_for("rollout"), peer="env_gateway"
        ) as channel,
    ):
        assert await echo_service.call(channel, "x") == "x"
        message = [StringValue(value=str(n)) for n in range(3)]
        counted = echo_service.method(channel, "Count", "unary_stream")(StringValue(value="3"))
        assert [one.value async for one in counted] == ["0", "1", "2"]
        joined = await echo_service.method(channel, "Join", "stream_unary")(iter(message))
        assert joined.value == "0,1,2"
        repeated = echo_service.method(channel, "Repeat", "stream_stream")(iter(message))
        assert [one.value async for one in repeated] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("serves", "calls", "peer", "cause"),
    [
        ("learner", run().tls_for("rollout"), "env_gateway", "another service of the run"),
        (None, run().tls_for("rollout"), "learner", "it speaks plain text"),
        (
            "learner",
            other_run().tls_for("rollout"),
            "learner",
            "its certificate belongs to another run",
        ),
        ("learner", None, "", "wants TLS (--tls-dir)"),
    ],
)
async def test_a_caller_learns_the_likely_cause(
    serves: str | None, calls: Tls | None, peer: str, cause: str
) -> None:
    async with echo_at("127.0.0.1", serves) as address:
        channel = rpc.channel(
            address, token=echo_service.TOKEN, wait_for_ready=False, tls=calls, peer=peer
        )
        async with channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await echo_service.call(channel, "x", timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert cause in likely_cause(caught.value.details())


def test_an_empty_text_has_no_cause() -> None:
    assert likely_cause("Deadline Exceeded") == likely_cause(None) == ""


async def test_a_channel_under_tls_must_know_whom_to_expect() -> None:
    with pytest.raises(ValueError, match="name of the expected peer"):
        rpc.plain_channel("127.0.0.1:7", tls=run().tls_for("rollout"))


@asynccontextmanager
async def registry(fake: FakeRegistry) -> AsyncGenerator[str]:
    server = rpc.server(token=echo_service.TOKEN)
    pb_grpc.add_RegistryServiceServicer_to_server(fake, server)
    at = rpc.serving(server, f"{beyond_loopback()}:0", tls=run().tls_for("launcher"), grace_s=0)
    async with at as serving:
        yield serving.address


def registry_channel(address: str, tls: Tls) -> grpc.aio.Channel:
    return rpc.channel(
        address, token=echo_service.TOKEN, wait_for_ready=False, tls=tls, peer="launcher"
    )


async def test_a_peer_is_found_by_its_registry_and_known_by_its_name() -> None:
    fake = FakeRegistry()
    async with (
        echo_at(beyond_loopback(), "learner") as address,
        registry(fake) as at,
        registry_channel(at, run().tls_for("rollout")) as channel,
    ):
        fake.peers = {0: address}
        peers = Peers(
            token=echo_service.TOKEN,
            run_id=RUN,
            registry=load_registry(),
            registry_channel=channel,
            tls=run().tls_for("rollout"),
        )
        assert await echo_service.call(await peers.channel("learner"), "found") == "found"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await echo_service.call(await peers.channel("env_gateway"), "x", timeout=10)
        assert "another service" in likely_cause(caught.value.details())
        await peers.close()


async def test_a_peer_beyond_loopback_is_refused_to_who_has_no_tls() -> None:
    fake, server = FakeRegistry(), rpc.server(token=echo_service.TOKEN)
    fake.peers = {0: "192.0.2.200:7"}
    pb_grpc.add_RegistryServiceServicer_to_server(fake, server)
    async with (
        rpc.serving(server, "127.0.0.1:0", grace_s=0) as serving,
        rpc.channel(serving.address, token=echo_service.TOKEN) as channel,
    ):
        peers = Peers(
            token=echo_service.TOKEN, run_id=RUN, registry=load_registry(), registry_channel=channel
        )
        with pytest.raises(ConfigError, match=r"refusing to call 192\.0\.2\.200:7"):
            await peers.channel("learner")
        await peers.close()


class RolloutMember:
    """A rollout's membership, and the commands that it received."""

    def __init__(self, channel: grpc.aio.Channel, clock: Callable[[], float]) -> None:
        self.drained: list[str] = []
        self._membership = Membership(
            ReplicaIdentity(RUN, "rollout", 0, "i"),
            load_registry(),
            channel,
            status=ReplicaStatus,
            drain=self.drained.append,
            stop=lambda _: None,
            clock=clock,
        )

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        task = asyncio.create_task(self._membership.run("192.0.2.9:7"))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_a_member_registers_under_tls() -> None:
    fake = FakeRegistry()
    async with (
        registry(fake) as at,
        registry_channel(at, run().tls_for("rollout")) as channel,
        RolloutMember(channel, lambda: 0.0).running(),
    ):
        await until(lambda: bool(fake.heartbeats))
    assert fake.registered[0].address == "192.0.2.9:7"


async def test_a_member_with_another_runs_certificate_drains_and_gives_the_reason() -> None:
    fake: Any = FakeRegistry()
    times = iter(range(0, 10**6, 1000))
    async with (
        registry(fake) as at,
        registry_channel(at, other_run().tls_for("rollout")) as channel,
    ):
        member = RolloutMember(channel, lambda: float(next(times)))
        async with member.running():
            await until(lambda: member.drained)
    assert "its certificate belongs to another run" in member.drained[0]
    assert fake.registered == []


async def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    for variable in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    async with (
        echo_at(beyond_loopback(), "learner") as address,
        rpc.channel(
            address, token=echo_service.TOKEN, tls=run().tls_for("rollout"), peer="learner"
        ) as channel,
    ):
        assert await echo_service.call(channel, "direct", timeout=5) == "direct"
