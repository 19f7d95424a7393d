"""A call and its answer, as every route sees them."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from flotilla_tinker.api.known_facts import KnownFacts
from flotilla_tinker.ports import FrontDesk
from flotilla_tinker.wire.json_bodies import JSON


@dataclass(frozen=True, slots=True)
class ClientCall:
    """A request of a tenant: the name of the key that it carries."""

    tenant: str
    # Parts of the path by their names, and the query.
    path: Mapping[str, str]
    query: Mapping[str, str]
    # What the client accepts.
    accept: str
    # Decompressed.
    body: bytes


@dataclass(frozen=True, slots=True)
class ApiAnswer:
    """An answer; with a `file` its body is that file's content."""

    status: int
    body: bytes = b""
    content_type: str = JSON
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    file: Path | None = None


@dataclass(frozen=True, slots=True)
class Front:
    """What the routes share."""

    desk: FrontDesk
    facts: KnownFacts
    # Of each long poll, which the SDK gives up after 45 s.
    poll_s: float = 30.0
    # Flags of `client/config`.
    client_flags: Mapping[str, Any] = field(default_factory=dict[str, Any])


class ApiRefusal(Exception):
    """A call is refused with a status for which the desk has no error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


Handler = Callable[[Front, ClientCall], Awaitable[ApiAnswer]]


def answer_json(code: int = 200, /, **fields: Any) -> ApiAnswer:
    """Return an answer with this status and these fields."""
    return ApiAnswer(code, msgspec.json.encode(fields))
