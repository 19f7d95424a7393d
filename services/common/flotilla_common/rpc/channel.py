"""A gRPC channel whose every call carries token, trace context and a deadline.

This wraps the multi-callables instead of using client interceptors: grpc.aio runs each intercepted
call in a task of its own, which costs more than everything added here.
"""

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from flotilla_common.rpc.auth import HEADER, bearer
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.telemetry import trace

# Longer deadlines overflow gRPC's clock on some platforms; no call needs a year.
MAX_TIMEOUT_S = 365 * 86400.0


class CallDefaults:
    """Token and deadlines that are added to each call of a channel."""

    def __init__(self, token: str, timeout_s: float, stream_timeout_s: float) -> None:
        if min(timeout_s, stream_timeout_s) <= 0:
            raise ConfigError("a default timeout must be above 0 seconds")
        self._authorization = (HEADER, bearer(token))
        self.timeout_s = timeout_s
        self.stream_timeout_s = stream_timeout_s

    def metadata(self, given: Any) -> tuple[tuple[str, str | bytes], ...]:
        pairs: list[tuple[str, str | bytes]] = [self._authorization]
        traceparent = trace.current_traceparent()
        if traceparent is not None:
            pairs.append((trace.HEADER, traceparent))
        if given:
            pairs.extend(given)
        return tuple(pairs)


class Channel(grpc.aio.Channel):
    """Channel that delegates each call to the channel that `current` returns at that time.

    A stub created once thus follows a peer that comes back at another address."""

    def __init__(self, current: Callable[[], grpc.aio.Channel], defaults: CallDefaults) -> None:
        self._current = current
        self._defaults = defaults

    async def __aenter__(self) -> "Channel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._current().close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current().channel_ready()

    def unary_unary(self, *arguments: Any, **keywords: Any) -> Any:
        return self._wrap("unary_unary", self._defaults.timeout_s, arguments, keywords)

    def unary_stream(self, *arguments: Any, **keywords: Any) -> Any:
        return self._wrap("unary_stream", self._defaults.stream_timeout_s, arguments, keywords)

    def stream_unary(self, *arguments: Any, **keywords: Any) -> Any:
        return self._wrap("stream_unary", self._defaults.stream_timeout_s, arguments, keywords)

    def stream_stream(self, *arguments: Any, **keywords: Any) -> Any:
        return self._wrap("stream_stream", self._defaults.stream_timeout_s, arguments, keywords)

    def _wrap(
        self, kind: str, timeout_s: float, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Callable[..., Any]:
        made_for: grpc.aio.Channel | None = None
        inner: Callable[..., Any]

        def call(
            request: Any = None,
            *,
            timeout: float | None = None,
            metadata: Any = None,
            **options: Any,
        ) -> Any:
            nonlocal made_for, inner
            channel = self._current()
            if channel is not made_for:
                _refuse_closed(channel)
                inner, made_for = getattr(channel, kind)(*arguments, **keywords), channel
            return inner(
                request,
                timeout=min(timeout_s if timeout is None else timeout, MAX_TIMEOUT_S),
                metadata=self._defaults.metadata(metadata),
                **options,
            )

        return call


def _refuse_closed(channel: grpc.aio.Channel) -> None:
    """Raise UsageError if the channel is closed, as a call on it does.

    The first call of a method on a closed channel would use memory that gRPC (1.85) has freed, and
    crash the process then or later."""
    if channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN:
        raise grpc.aio.UsageError("Channel is closed.")
