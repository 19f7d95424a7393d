"""Messages that a verifier's process may send to the gateway. Pure.

The verifier runs in that process and can write anything, so every line is checked here: the
most that it can claim is a result, which it could as well have returned."""

from dataclasses import dataclass
from typing import Any, cast

from flotilla_common.text.parsing import ParseError, TextLimits, TooLargeError, parse_json
from flotilla_env_gateway.ports import SqlValue

LINE_BYTES = 4 * 2**20
# A query has at most 32,766 arguments, so a line needs no more values.
_LIMITS = TextLimits(bytes=LINE_BYTES, values=2**16)
# Total bytes that one verifier may write, and its number of requests.
_TOTAL_BYTES = 16 * 2**20
_MESSAGES = 20_000
_RESULT_CHARS = 200
_DATABASES = ("seed", "current")


class ProtocolError(Exception):
    """A line that violates the protocol, or more output than a verifier may write."""


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """Report that the process has its limits and can take a job."""


@dataclass(frozen=True, slots=True)
class SnapshotRequest:
    """Request for a copy of a whole database."""

    db: str


@dataclass(frozen=True, slots=True)
class QueryRequest:
    """Request for rows of a database of which the process holds no copy."""

    db: str
    sql: str
    args: tuple[SqlValue, ...]


@dataclass(frozen=True, slots=True)
class ToolCallRequest:
    """Request for a tool call that only reads."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class VerifierDone:
    """Result of a verifier. `result` is a plain value, or {"score": ..., "passed": [...],
    "failed": [...], "rewards": {...}} with checks, rewards, or both."""

    result: Any
    stdout: str
    error: str | None


WorkerMessage = WorkerReady | SnapshotRequest | QueryRequest | ToolCallRequest | VerifierDone


def parse_message(line: bytes) -> WorkerMessage:
    """Parse one line. Raises ProtocolError."""
    message = _parse_line(line)
    match message:
        case {"ready": True}:
            return WorkerReady()
        case {"snapshot": str(db)} if db in _DATABASES:
            return SnapshotRequest(db)
        case {"query": str(sql), "db": str(db), "args": list()} if db in _DATABASES:
            args = cast("list[Any]", message["args"])
            return QueryRequest(db, sql, tuple(_check_value(arg) for arg in args))
        case {"call": str(name), "arguments": dict()}:
            return ToolCallRequest(name, cast("dict[str, Any]", message["arguments"]))
        case {"done": {"stdout": str(stdout)}}:
            return _parse_done(stdout, message["done"])
        case _:
            raise ProtocolError("the verifier's process wrote an unknown message")


def _parse_line(line: bytes) -> Any:
    try:
        return parse_json(line, _LIMITS)
    except TooLargeError as error:
        raise ProtocolError(f"the verifier's process wrote too much at once: {error}") from error
    except ParseError as error:
        raise ProtocolError("the verifier's process wrote something else than JSON") from error


def _parse_done(stdout: str, done: dict[str, Any]) -> VerifierDone:
    result, error = done.get("result"), done.get("error")
    if not isinstance(error, str | None):
        raise ProtocolError("the error of a verifier is not a text")
    result = (
        _check_report(cast("dict[str, Any]", result))
        if isinstance(result, dict)
        else _shorten_result(result)
    )
    return VerifierDone(result, stdout, error)


def _check_report(result: dict[str, Any]) -> dict[str, Any]:
    parts = {name: value for name, value in result.items() if name not in ("score", "rewards")}
    if parts and not (parts.keys() == {"passed", "failed"} and all(map(_is_texts, parts.values()))):
        raise ProtocolError("the checks of a verifier are not lists of texts")
    rewards = result.get("rewards", {})
    if not isinstance(rewards, dict) or "score" not in result or result.keys() == {"score"}:
        raise ProtocolError("a verifier's process described a score in an unknown way")
    for value in cast("dict[str, object]", rewards).values():
        _check_value(value)
    return {**result, "score": _shorten_result(result["score"])}


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, str) for item in cast("list[object]", value)
    )


def _shorten_result(result: object) -> bool | int | float | str | None:
    value = _check_value(result)
    return value[:_RESULT_CHARS] if isinstance(value, str) else value


def _check_value(value: object) -> bool | int | float | str | None:
    if not isinstance(value, bool | int | float | str | None):
        raise ProtocolError(f"a {type(value).__name__} where only plain values may be")
    return value


class MessageBudget:
    """Counter of one verifier's output. Raises ProtocolError beyond the limit."""

    def __init__(self) -> None:
        self._bytes = 0
        self._messages = 0

    def count_line(self, line: bytes) -> None:
        self._bytes += len(line)
        self._messages += 1
        if self._bytes > _TOTAL_BYTES:
            raise ProtocolError(f"the verifier wrote more than {_TOTAL_BYTES} bytes")
        if self._messages > _MESSAGES:
            raise ProtocolError(f"the verifier sent more than {_MESSAGES} requests")
