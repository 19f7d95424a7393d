"""Defaults of grpcio that must not apply here, each over real sockets."""

import asyncio
import os
import signal
import sys
import time
from typing import Any, cast

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from flotilla.env_gateway.v1 import episode_service_pb2 as env_pb
from flotilla.env_gateway.v1 import episode_service_pb2_grpc as env_grpc
from flotilla.launcher.v1 import registry_service_pb2 as registry_pb
from flotilla.launcher.v1 import run_service_pb2 as launcher_pb
from flotilla.learner.v1 import group_service_pb2 as learner_pb
from flotilla.learner.v1 import policy_service_pb2 as policy_pb
from flotilla.learner.v1 import training_service_pb2 as training_pb
from flotilla.learner.v1 import weight_service_pb2 as weight_pb
from flotilla.rollout.v1 import rollout_service_pb2 as rollout_pb
from flotilla_common.rpc import rpc, rpc_options, rpc_retries
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.free_ports import free_address
from tests.common.conftest import Serve, StartProcess
from tests.support import echo_service
from tests.support.closed_channels import TIMES
from tests.support.fake_peers import TOKEN, FakeGateway, served


async def test_a_killed_peer_is_noticed_at_once(echo_process: StartProcess) -> None:
    process, address = await echo_process("127.0.0.1:0")
    async with rpc.channel(address, token=echo_service.TOKEN) as channel:
        stream = echo_service.method(channel, "Repeat", "stream_stream")(timeout=30)
        await stream.write(StringValue(value="begun"))
        assert (await stream.read()).value == "begun"
        process.kill()
        started = time.monotonic()
        assert await stream.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - started < 5.0


async def test_a_frozen_peer_is_noticed_within_seconds(echo_process: StartProcess) -> None:
    process, address = await echo_process("127.0.0.1:0")
    async with rpc.channel(address, token=echo_service.TOKEN) as channel:
        assert await echo_service.call(channel, "warm") == "warm"
        # A stream that has begun is not retried, so that the end of the connection shows.
        stream = echo_service.method(channel, "Repeat", "stream_stream")(timeout=30)
        await stream.write(StringValue(value="begun"))
        assert (await stream.read()).value == "begun"
        os.kill(process.pid, signal.SIGSTOP)
        started = time.monotonic()
        assert await stream.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - started < 20.0


async def test_a_call_on_a_closed_channel_is_an_error_and_uses_no_freed_memory() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.closed_channels"),
        # Freed memory is overwritten, so that its use crashes.
        env={**os.environ, "MALLOC_PERTURB_": "165"},
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert (process.returncode, output.decode().split()) == (0, [str(TIMES)])


async def test_pings_do_not_kill_a_healthy_quiet_call(serve: Serve) -> None:
    async def slow(request: StringValue, context: Any) -> StringValue:
        await asyncio.sleep(4.5)
        return request

    channel = await serve(Slow=slow)
    response = await echo_service.method(channel, "Slow")(StringValue(value="still here"))
    assert response.value == "still here"


async def test_a_second_server_on_the_same_port_is_refused() -> None:
    async with rpc.serving(rpc.server(token=echo_service.TOKEN), "127.0.0.1:0") as first:
        with pytest.raises(ConfigError, match="another process has the port"):
            async with rpc.serving(rpc.server(token=echo_service.TOKEN), first.address):
                pytest.fail("two servers share one port")


async def test_an_exception_in_a_handler_does_not_reveal_its_text(serve: Serve) -> None:
    async def fail(request: StringValue, context: Any) -> StringValue:
        raise RuntimeError("Authorization: Bearer sk-live-SECRET")

    channel = await serve(Echo=fail)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await echo_service.call(channel, "x")
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "SECRET" not in repr(caught.value)
    error = rpc.service_error(caught.value)
    assert error is not None
    assert error.reason == "INTERNAL"


@pytest.mark.parametrize(
    "raw", [b"\xff" * 200, b"\x0a\xff", b"\x0a\x02\xff\xfe", b"\x0b" * 5000], ids=repr
)
async def test_malformed_bytes_are_the_callers_fault(serve: Serve, raw: bytes) -> None:
    channel = await serve()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await echo_service.method(channel, "Echo")(raw)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await echo_service.method(channel, "Join", "stream_unary")(iter([raw]))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_empty_message_and_unknown_fields_are_fine(serve: Serve) -> None:
    channel = await serve()
    assert (await echo_service.method(channel, "Echo")(b"")).value == ""
    assert (await echo_service.method(channel, "Echo")(b"\x0a\x01a\x98\x06\x01")).value == "a"


def test_no_stream_of_requests_is_left_to_grpc_to_repeat() -> None:
    learner = (learner_pb, policy_pb, training_pb, weight_pb)
    contracts = (*learner, env_pb, launcher_pb, registry_pb, rollout_pb)
    streams = [
        {"service": service.full_name, "method": method.name}
        for contract in contracts
        for service in contract.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if method.client_streaming
    ]
    assert sorted(streams, key=str) == sorted(rpc_retries.REQUEST_STREAMS, key=str)


async def test_a_refused_stream_of_requests_is_reported_at_once_and_not_sent_again() -> None:
    gateway = FakeGateway(fail={"Grade": 5})
    add = lambda server: env_grpc.add_EpisodeServiceServicer_to_server(gateway, server)  # noqa: E731
    async with served(add) as address, rpc.channel(address, token=TOKEN) as channel:
        stub = cast("env_grpc.EpisodeServiceAsyncStub", env_grpc.EpisodeServiceStub(channel))
        parts = [env_pb.GradeRequest(transcript_chunk=b"x")] * 5
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Grade(iter(parts), timeout=10)
    # INTERNAL if the refusal arrives while gRPC writes a message.
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
    assert gateway.fail["Grade"] == 4


async def test_a_full_chunk_passes_and_a_larger_message_is_named(serve: Serve) -> None:
    calls = 0

    async def counted(request: StringValue, context: Any) -> StringValue:
        nonlocal calls
        calls += 1
        return StringValue(value=str(len(request.value)))

    channel = await serve(Echo=counted)
    assert await echo_service.call(channel, "x" * 2**20) == str(2**20)
    started = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as caught:
        await echo_service.call(channel, "x" * rpc_options.MAX_MESSAGE_BYTES)
    # The code of overload; it is never retried, for the message stays too large.
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert time.monotonic() - started < 10.0
    assert calls == 1


async def test_metadata_over_the_limit_ends_one_call_only(serve: Serve) -> None:
    channel = await serve()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await echo_service.call(channel, "x", metadata=(("big", "x" * 40_000),))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await echo_service.call(channel, "y") == "y"


async def test_a_restarted_peer_is_found_again_within_seconds(echo_process: StartProcess) -> None:
    process, address = await echo_process(free_address())
    async with rpc.channel(address, token=echo_service.TOKEN) as channel:
        assert await echo_service.call(channel, "before") == "before"
        process.kill()
        await process.wait()
        waiting = asyncio.create_task(echo_service.call(channel, "after", timeout=30))
        await asyncio.sleep(1.5)
        await echo_process(address)
        up = time.monotonic()
        assert await waiting == "after"
        assert time.monotonic() - up < 10.0


async def test_a_call_without_a_deadline_gets_one(serve: Serve) -> None:
    seen: list[float | None] = []

    async def remember(request: StringValue, context: Any) -> StringValue:
        seen.append(context.time_remaining())
        return request

    channel = await serve(Echo=remember)
    await echo_service.call(channel, "default")
    await echo_service.call(channel, "own", timeout=5)
    await echo_service.call(channel, "huge", timeout=1e12)
    default, own, huge = seen
    assert default is not None
    assert 58 < default < 61
    assert own is not None
    assert 4 < own < 6
    assert huge is not None
    assert huge > 86400


@pytest.mark.parametrize("seconds", [-1, -1e9])
async def test_a_deadline_that_has_passed_ends_the_call(serve: Serve, seconds: float) -> None:
    channel = await serve()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await echo_service.call(channel, "x", timeout=seconds)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_client_that_gives_up_cancels_the_handler(serve: Serve) -> None:
    cancelled = asyncio.Event()

    async def hang(request: StringValue, context: Any) -> StringValue:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()
        return request

    channel = await serve(Echo=hang)
    with pytest.raises(grpc.aio.AioRpcError):
        await echo_service.call(channel, "x", timeout=0.2)
    await asyncio.wait_for(cancelled.wait(), 30)


async def test_a_server_answering_unavailable_is_tried_again(serve: Serve) -> None:
    attempts = 0

    async def third_time(request: StringValue, context: Any) -> StringValue:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not yet")
        return request

    channel = await serve(Echo=third_time)
    assert await echo_service.call(channel, "x") == "x"
    assert attempts == 3


async def test_no_call_of_a_burst_is_cancelled_before_the_service_sees_it(serve: Serve) -> None:
    async def take_long(request: StringValue, context: Any) -> StringValue:
        await asyncio.sleep(1.0)
        return request

    channel = await serve(Echo=take_long)
    calls = (echo_service.call(channel, str(n), timeout=60.0) for n in range(4000))
    assert await asyncio.gather(*calls) == [str(n) for n in range(4000)]


async def test_bytes_of_another_protocol_do_not_disturb_the_service(serve: Serve) -> None:
    server = rpc.server(token=echo_service.TOKEN)
    echo_service.add(server)
    async with rpc.serving(server, "127.0.0.1:0") as serving:
        host, port = serving.address.split(":")
        for junk in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", os.urandom(500), b"\x16\x03\x01"):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(junk)
            await writer.drain()
            writer.close()
        async with rpc.channel(serving.address, token=echo_service.TOKEN) as channel:
            assert await echo_service.call(channel, "x") == "x"
