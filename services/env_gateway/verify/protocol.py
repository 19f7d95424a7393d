"""What a verifier's process may say to the gateway. Pure.

The verifier runs in that process and can write whatever it likes, so every line is checked here:
the most that it can claim is a result, which it could as well have returned.
"""

from dataclasses import dataclass
from typing import Any, cast

from services.common.parsing import Limits, ParseError, TooLargeError, parse_json
from services.env_gateway.ports import SqlValue

LINE_BYTES = 4 * 2**20
# A query has at most 32,766 arguments, which is the most that one line has reason to hold.
_LIMITS = Limits(bytes=LINE_BYTES, values=2**16)
# What one verifier may write in all, and how often it may ask.
_TOTAL_BYTES = 16 * 2**20
_MESSAGES = 20_000
_RESULT_CHARS = 200
_DATABASES = ("seed", "current")


class ProtocolError(Exception):
    """A line that is not of the protocol, or more of them than a verifier has reason to write."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The process has its limits and can take a job."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Asks for a copy of a whole database."""

    db: str


@dataclass(frozen=True, slots=True)
class Query:
    """Asks for rows of a database of which there is no copy."""

    db: str
    sql: str
    args: tuple[SqlValue, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """Asks for a tool call that only reads."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Done:
    """`result` is a plain value, or {"score": ..., "passed": [...], "failed": [...]}; `cut` says
    that more was printed than `stdout` holds."""

    result: Any
    stdout: str
    error: str | None
    cut: bool = False


Message = Ready | Snapshot | Query | Call | Done


def parse(line: bytes) -> Message:
    """Raises ProtocolError."""
    try:
        message: Any = parse_json(line, _LIMITS)
    except TooLargeError as error:
        raise ProtocolError(f"the verifier's process wrote too much at once: {error}") from error
    except ParseError as error:
        raise ProtocolError("the verifier's process wrote something else than JSON") from error
    match message:
        case {"ready": True}:
            return Ready()
        case {"snapshot": str(db)} if db in _DATABASES:
            return Snapshot(db)
        case {"query": str(sql), "db": str(db), "args": list()} if db in _DATABASES:
            args = cast("list[Any]", message["args"])
            return Query(db, sql, tuple(_value(arg) for arg in args))
        case {"call": str(name), "arguments": dict()}:
            return Call(name, cast("dict[str, Any]", message["arguments"]))
        case {"done": {"stdout": str(stdout)}}:
            return _done(stdout, message["done"])
        case _:
            raise ProtocolError("the verifier's process wrote an unknown message")


def _done(stdout: str, done: dict[str, Any]) -> Done:
    result, error = done.get("result"), done.get("error")
    if not isinstance(error, str | None):
        raise ProtocolError("the error of a verifier is not a text")
    result = _report(cast("dict[str, Any]", result)) if isinstance(result, dict) else _short(result)
    return Done(result, stdout, error, done.get("cut") is True)


def _report(result: dict[str, Any]) -> dict[str, Any]:
    lists = [result.get("passed"), result.get("failed")]
    if result.keys() == {"score", "passed", "failed"} and all(map(_is_texts, lists)):
        return {**result, "score": _short(result["score"])}
    raise ProtocolError("the checks of a verifier are not lists of texts")


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, str) for item in cast("list[object]", value)
    )


def _short(result: object) -> bool | int | float | str | None:
    value = _value(result)
    return value[:_RESULT_CHARS] if isinstance(value, str) else value


def _value(value: object) -> bool | int | float | str | None:
    if not isinstance(value, bool | int | float | str | None):
        raise ProtocolError(f"a {type(value).__name__} where only plain values may be")
    return value


class Budget:
    """Counts what one verifier wrote. Raises ProtocolError when it is too much."""

    def __init__(self) -> None:
        self._bytes = 0
        self._messages = 0

    def spend(self, line: bytes) -> None:
        self._bytes += len(line)
        self._messages += 1
        if self._bytes > _TOTAL_BYTES:
            raise ProtocolError(f"the verifier wrote more than {_TOTAL_BYTES} bytes")
        if self._messages > _MESSAGES:
            raise ProtocolError(f"the verifier asked more than {_MESSAGES} times")
