"""gRPC for every service: channels, servers, serving, and errors across the wire.

The options are in `rpc_options`, gRPC's own retries in `rpc_retries`, and the steps of every
answered call in `rpc_handlers`.

Under TLS a failed handshake is UNAVAILABLE, just like an absent peer: a call that waits for ready
retries it until it ends with a bare "Deadline Exceeded". If the server rejects a client's
certificate, the client only sees "Socket closed". `tls.likely_cause` interprets these texts.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf import duration_pb2
from google.protobuf.duration import from_nanoseconds
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2_grpc
from grpc_status import rpc_status

from flotilla_common.aio.concurrency import keep_cancellation
from flotilla_common.process import open_file_limit
from flotilla_common.rpc.auth import Authenticator
from flotilla_common.rpc.channel import CallDefaults, Channel
from flotilla_common.rpc.errors import ConfigError, ServiceError
from flotilla_common.rpc.health import METHODS as HEALTH_METHODS
from flotilla_common.rpc.health import MOST_WATCHES, Health
from flotilla_common.rpc.health import WATCH as HEALTH_WATCH
from flotilla_common.rpc.network_addresses import advertised_address, check_dial, check_listen
from flotilla_common.rpc.rpc_handlers import Interceptor
from flotilla_common.rpc.rpc_options import CHANNEL_OPTIONS, SERVER_OPTIONS
from flotilla_common.rpc.rpc_retries import REQUEST_STREAMS, RETRY_POLICY
from flotilla_common.rpc.tls import Tls, channel_credentials, server_credentials

T = TypeVar("T")

DEFAULT_TIMEOUT_S = 60.0
DEFAULT_STREAM_TIMEOUT_S = 3600.0


def plain_channel(
    address: str, *, wait_for_ready: bool = True, tls: Tls | None = None, peer: str = ""
) -> grpc.aio.Channel:
    """Open a channel with our options that adds nothing to calls.

    With `wait_for_ready` a call to an absent peer waits until its deadline; without, it retries for
    some 3 seconds and fails with UNAVAILABLE. With `tls` the other side must have the certificate
    of the run's service `peer`, whatever its address. Raises ConfigError beyond loopback without
    `tls`."""
    check_dial(address, encrypted=tls is not None)
    retried = {"name": [{}], "waitForReady": wait_for_ready, "retryPolicy": RETRY_POLICY}
    once = {"name": REQUEST_STREAMS, "waitForReady": wait_for_ready}
    config = json.dumps({"methodConfig": [retried, once]})
    options = [*CHANNEL_OPTIONS, ("grpc.service_config", config)]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if not peer:
        raise ValueError("a channel under TLS needs the name of the expected peer")
    options.append(("grpc.ssl_target_name_override", tls.name_of(peer)))
    return grpc.aio.secure_channel(address, channel_credentials(tls), options=options)


def channel(
    address: str,
    *,
    token: str,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    stream_timeout_s: float = DEFAULT_STREAM_TIMEOUT_S,
    wait_for_ready: bool = True,
    tls: Tls | None = None,
    peer: str = "",
) -> grpc.aio.Channel:
    """Open a channel whose calls carry the token, trace context and a deadline.

    If the caller gives no deadline, it is `timeout_s`, or `stream_timeout_s` for calls with a
    stream. Everything else is as in `plain_channel`."""
    inner = plain_channel(address, wait_for_ready=wait_for_ready, tls=tls, peer=peer)
    return Channel(lambda: inner, CallDefaults(token, timeout_s, stream_timeout_s))


def server(*, token: str, most_streams: Mapping[str, int] | None = None) -> grpc.aio.Server:
    """Make a server that answers only calls with `token`, except for health checks.

    `most_streams` limits the concurrent calls of a method that streams its answer; the default is
    MOST_STREAMS. A ServiceError raised by a handler reaches the caller unchanged, any other
    exception as INTERNAL with a random id that the log explains. Streams of requests must be read
    by iteration, not by `context.read()`."""
    streams = {HEALTH_WATCH: MOST_WATCHES, **(most_streams or {})}
    interceptor = Interceptor(Authenticator(token), HEALTH_METHODS, streams)
    most = ("grpc.max_allowed_incoming_connections", open_file_limit.most_connections())
    return grpc.aio.server(interceptors=[interceptor], options=[*SERVER_OPTIONS, most])


@dataclass(frozen=True, slots=True)
class Serving:
    """A running server: its address for others, and the setter of its answer to health checks."""

    address: str
    set_serving: Callable[[bool], None]


@asynccontextmanager
async def serving(
    server: grpc.aio.Server,
    listen: str,
    *,
    tls: Tls | None = None,
    advertise: str | None = None,
    grace_s: float = 5.0,
) -> AsyncGenerator[Serving]:
    """Serve while the block runs; health is NOT_SERVING until the block changes it.

    With `tls` only holders of a certificate of the run can make calls, health checks included.
    `advertise` is where others reach this machine, as a host or host:port, if not at `listen`. At
    the end health turns NOT_SERVING, new calls are refused and running ones have `grace_s` to
    finish. Raises ConfigError if `listen` is taken, or beyond loopback without `tls`.
    """
    host, _ = check_listen(listen, encrypted=tls is not None)
    advertised_address(host, 0, advertise)  # raises before anything is open
    health = Health()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    try:
        if tls is None:
            port = server.add_insecure_port(listen)
        else:
            port = server.add_secure_port(listen, server_credentials(tls))
    except RuntimeError as error:
        raise ConfigError(
            f"cannot listen on {listen}: another process has the port; stop it, or use port 0"
        ) from error
    open_file_limit.raise_file_limit()
    await server.start()
    try:
        yield Serving(advertised_address(host, port, advertise), health.set_serving)
    finally:
        health.set_serving(False)
        # gRPC waits by `asyncio.wait_for`.
        with keep_cancellation():
            await server.stop(grace_s)


def service_error(error: grpc.aio.AioRpcError) -> ServiceError | None:
    """Return the ServiceError behind a failed call, if one of our services raised it."""
    try:
        status = rpc_status.from_call(error)  # pyright: ignore[reportArgumentType]
    except ValueError:  # details that contradict the status: not ours
        return None
    found: ServiceError | None = None
    retry_delay_s: float | None = None
    for detail in status.details if status else ():
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            found = ServiceError(
                error.code(),
                info.reason,
                status.message,
                domain=info.domain,
                metadata=dict(info.metadata),
            )
        elif detail.Unpack(retry):
            retry_delay_s = to_seconds(retry.retry_delay)
    if found is not None:
        found.retry_delay_s = retry_delay_s
    return found


def refusal_reason(error: grpc.aio.AioRpcError) -> str:
    """Return the contract's reason of the refusal, or the name of the status."""
    refused = service_error(error)
    return refused.reason if refused else error.code().name


def describe_error(error: grpc.aio.AioRpcError) -> str:
    return f"{refusal_reason(error)}: {error.details()}"


async def read_last_message(
    call: grpc.aio.UnaryStreamCall[Any, T], abandoned: Callable[[T], object]
) -> T | None:
    """Return the last message of a stream, read to its end; None if there was none.

    If the reading is cancelled, `abandoned` gets the last message so far: the server may have
    finished by then, and would not notice the cancellation."""
    last: T | None = None
    try:
        async for message in call:
            last = message
    except asyncio.CancelledError:
        if last is not None:
            abandoned(last)
        raise
    finally:
        # Cancelling the task that reads does not always end the call.
        call.cancel()
    return last


def to_duration(seconds: float) -> duration_pb2.Duration:
    """Return `seconds` as a protobuf Duration."""
    return from_nanoseconds(round(seconds * 1e9))


def to_seconds(duration: duration_pb2.Duration) -> float:
    """Return a protobuf Duration in seconds."""
    return duration.seconds + duration.nanos / 1e9
