"""Tokens, errors, health, traces and listening addresses across a real connection."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from flotilla_common.rpc import rpc
from flotilla_common.rpc.errors import ConfigError, ServiceError
from flotilla_common.telemetry import trace
from tests.common.conftest import Serve
from tests.support import echo_service

KINDS = {
    "Echo": "unary_unary",
    "Count": "unary_stream",
    "Join": "stream_unary",
    "Repeat": "stream_stream",
}


async def silence() -> AsyncIterator[StringValue]:
    """A caller that is refused as it writes may see INTERNAL, which is gRPC's own."""
    await asyncio.Event().wait()
    yield StringValue()


async def outcome(
    channel: grpc.aio.Channel,
    name: str,
    *,
    stream: AsyncIterator[StringValue] | None = None,
    **options: Any,
) -> list[str]:
    """Return the final values of a call of any kind."""
    kind = KINDS[name]
    request = StringValue(value="2")
    call = echo_service.method(channel, name, kind)
    given = (stream or iter([request])) if kind.startswith("stream") else request
    if kind.endswith("stream"):
        return [message.value async for message in call(given, **options)]
    return [(await call(given, **options)).value]


@pytest.mark.parametrize("name", KINDS)
async def test_every_kind_of_call_works_with_the_token(serve: Serve, name: str) -> None:
    channel = await serve()
    assert await outcome(channel, name) == (["0", "1"] if name == "Count" else ["2"])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ((), "TOKEN_MISSING"),
        ((("authorization", ""),), "TOKEN_WRONG"),
        ((("authorization", "Bearer wrong-token-0123456"),), "TOKEN_WRONG"),
        ((("authorization", echo_service.TOKEN),), "TOKEN_WRONG"),
        ((("authorization", f"Bearer {echo_service.TOKEN}"),) * 2, "TOKEN_WRONG"),
    ],
)
async def test_every_kind_of_call_is_refused_without_the_token(
    name: str, metadata: Any, reason: str
) -> None:
    server = rpc.server(token=echo_service.TOKEN)
    echo_service.add(server)
    async with (
        rpc.serving(server, "127.0.0.1:0") as serving,
        rpc.plain_channel(serving.address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await outcome(channel, name, stream=silence(), metadata=metadata, timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    error = rpc.service_error(caught.value)
    assert error is not None
    assert error.reason == reason
    assert echo_service.TOKEN not in repr(caught.value)


@pytest.mark.parametrize(
    "token", ["", "short", "with space 0123456", "line\nend-0123456789", "é" * 20]
)
def test_a_token_that_cannot_travel_is_refused_without_being_shown(token: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rpc.server(token=token)
    assert "FLOTILLA_TOKEN" in str(caught.value)
    assert token not in str(caught.value) or token in ("", "short")


async def test_health_needs_no_token_and_reports_when_the_service_is_ready() -> None:
    async with (
        rpc.serving(rpc.server(token=echo_service.TOKEN), "127.0.0.1:0") as serving,
        rpc.plain_channel(serving.address) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch: Any = stub.Watch(health_pb2.HealthCheckRequest(), timeout=10)
        statuses = health_pb2.HealthCheckResponse
        assert (await watch.read()).status == statuses.NOT_SERVING
        serving.set_serving(True)
        assert (await watch.read()).status == statuses.SERVING
        check: Any = stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert (await check).status == statuses.SERVING
        watch.cancel()


@pytest.mark.parametrize("name", KINDS)
async def test_a_service_error_arrives_whole_from_every_kind_of_call(name: str) -> None:
    refusal = ServiceError(
        grpc.StatusCode.FAILED_PRECONDITION,
        "STALE_EPOCH",
        "epoch 3 is over",
        domain="test.flotilla",
        metadata={"epoch": "4"},
        retry_delay_s=1.5,
    )
    async with failing_server(refusal) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await outcome(channel, name)
    error = rpc.service_error(caught.value)
    assert error is not None
    assert (error.code, error.reason, error.message) == (
        refusal.code,
        refusal.reason,
        refusal.message,
    )
    assert (error.domain, error.metadata, error.retry_delay_s) == (
        "test.flotilla",
        {"epoch": "4"},
        1.5,
    )


@pytest.mark.parametrize("name", KINDS)
async def test_an_unexpected_error_hides_its_text_in_every_kind_of_call(name: str) -> None:
    async with failing_server(ValueError("sk-live-SECRET")) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await outcome(channel, name)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "SECRET" not in repr(caught.value)


async def test_a_method_that_is_declared_but_not_written_is_unimplemented() -> None:
    server = rpc.server(token=echo_service.TOKEN)
    health_pb2_grpc.add_HealthServicer_to_server(health_pb2_grpc.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with rpc.channel(f"127.0.0.1:{port}", token=echo_service.TOKEN) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        check: Any = stub.Check(health_pb2.HealthCheckRequest())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check
        unknown = channel.unary_unary("/test.Absent/Unknown")
        with pytest.raises(grpc.aio.AioRpcError) as second:
            await unknown(b"")
    await server.stop(0)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert second.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_trace_continues_in_the_service_that_is_called(serve: Serve) -> None:
    seen: list[str | None] = []

    async def remember(request: StringValue, context: Any) -> StringValue:
        seen.append(trace.current_traceparent())
        return request

    channel = await serve(Echo=remember)
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    async def traced() -> None:
        trace.continue_from(traceparent)
        await echo_service.call(channel, "x")

    await asyncio.create_task(traced())
    await echo_service.call(channel, "untraced")
    assert seen == [traceparent, None]


async def test_calls_are_counted_by_method_and_outcome(serve: Serve) -> None:
    channel = await serve()
    labels = {"method": "/test.Echo/Count", "code": "OK"}
    before = REGISTRY.get_sample_value("flotilla_rpc_handled_total", labels) or 0
    await outcome(channel, "Count")
    assert REGISTRY.get_sample_value("flotilla_rpc_handled_total", labels) == before + 1


async def test_stopping_lets_running_calls_finish() -> None:
    begun = asyncio.Event()

    async def slow(request: StringValue, context: Any) -> StringValue:
        begun.set()
        await asyncio.sleep(0.5)
        return request

    server = rpc.server(token=echo_service.TOKEN)
    echo_service.add(server, Echo=slow)
    async with rpc.serving(server, "127.0.0.1:0", grace_s=5) as serving:
        channel = rpc.channel(serving.address, token=echo_service.TOKEN)
        running = asyncio.create_task(echo_service.call(channel, "finished"))
        await begun.wait()
    assert await running == "finished"
    await channel.close()


@pytest.mark.parametrize("moment", range(60))
async def test_a_cancellation_while_the_server_stops_is_not_lost(moment: int) -> None:
    started, leave = asyncio.Event(), asyncio.Event()

    async def serve() -> None:
        async with rpc.serving(rpc.server(token=echo_service.TOKEN), "127.0.0.1:0", grace_s=5):
            started.set()
            await leave.wait()
        await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    await started.wait()
    leave.set()
    for _ in range(moment):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=5)
    assert task.cancelled()


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "10.0.0.1:80", "example.com:80"])
async def test_listening_beyond_loopback_is_refused_and_the_fix_named(listen: str) -> None:
    with pytest.raises(ConfigError, match=r"TLS.*127\.0\.0\.1:0"):
        async with rpc.serving(rpc.server(token=echo_service.TOKEN), listen):
            pytest.fail("it listens")


@pytest.mark.parametrize("listen", ["", "127.0.0.1", ":80", "127.0.0.1:port", "127.0.0.1:70000"])
async def test_a_listen_address_without_host_or_port_is_refused(listen: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        async with rpc.serving(rpc.server(token=echo_service.TOKEN), listen):
            pytest.fail("it listens")


@given(st.floats(min_value=-1e9, max_value=1e9))
def test_durations_survive_the_wire_to_the_nanosecond(value: float) -> None:
    assert rpc.to_seconds(rpc.to_duration(value)) == pytest.approx(value, abs=1e-6)


class failing_server:
    """The echo service with every method failing with one error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def __aenter__(self) -> grpc.aio.Channel:
        async def one(request: Any, context: Any) -> StringValue:
            raise self._error

        async def many(request: Any, context: Any) -> AsyncIterator[StringValue]:
            raise self._error
            yield StringValue()

        server = rpc.server(token=echo_service.TOKEN)
        codec: dict[str, Any] = {
            "request_deserializer": StringValue.FromString,
            "response_serializer": StringValue.SerializeToString,
        }
        handlers = {
            "Echo": grpc.unary_unary_rpc_method_handler(one, **codec),
            "Count": grpc.unary_stream_rpc_method_handler(many, **codec),
            "Join": grpc.stream_unary_rpc_method_handler(one, **codec),
            "Repeat": grpc.stream_stream_rpc_method_handler(many, **codec),
        }
        handler = grpc.method_handlers_generic_handler(echo_service.SERVICE, handlers)
        server.add_generic_rpc_handlers((handler,))
        self._serving = rpc.serving(server, "127.0.0.1:0", grace_s=0)
        address = (await self._serving.__aenter__()).address
        self._channel = rpc.channel(address, token=echo_service.TOKEN)
        return self._channel

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()
        await self._serving.__aexit__(None, None, None)
