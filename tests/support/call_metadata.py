"""Channels whose calls carry metadata of their caller."""

from collections.abc import Callable, Mapping
from typing import Any

import grpc.aio

from flotilla_common.rpc.channel import CallDefaults, Channel
from flotilla_common.rpc.rpc import DEFAULT_STREAM_TIMEOUT_S, DEFAULT_TIMEOUT_S

Source = Callable[[], Mapping[str, str]]


class CallMetadata(CallDefaults):
    """Metadata that `source` returns at each call; the inner channel adds the token."""

    def __init__(self, source: Source) -> None:
        super().__init__("0" * 16, DEFAULT_TIMEOUT_S, DEFAULT_STREAM_TIMEOUT_S)
        self._source = source

    def metadata(self, given: Any) -> tuple[tuple[str, str | bytes], ...]:
        return (*self._source().items(), *(given or ()))


def with_metadata(inner: grpc.aio.Channel, source: Source) -> grpc.aio.Channel:
    return Channel(lambda: inner, CallMetadata(source))
