"""Outside text as values, bounded before anything is built of it.

CPython's parsers hold the interpreter while they run, in a thread as well, so that a limit on time
alone comes too late. Their time and memory follow from how much they build, and that is counted
first, at a gigabyte a second: commas, colons and brackets outside strings, and how deep these nest.
"""

import ast
import asyncio
import json
import math
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

# Text above this is handled in a thread: what its parser calls back lets the event loop in.
ASIDE_BYTES = 2**16
# No double holds more; the time to convert an integer grows with the square of its digits.
_DIGITS = 512
_STRUCTURE = b",:[{"
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SHOWN = 100
# What is done with warnings is one setting for all threads: two would restore each other's.
_ONE_AT_A_TIME = threading.Lock()


class ParseError(ValueError):
    """The text is not what it should be; the message says where."""


class TooLargeError(ParseError):
    """The text exceeds a limit; the message says which."""


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Bounds of one text: `values` counts values, keys and containers, and `depth` how far
    containers nest."""

    bytes: int
    values: int
    depth: int = 100


def parse_json(text: str | bytes, limits: TextLimits, *, strict: bool = False) -> Any:
    """Return the value of a JSON text; a strict one repeats no key and has finite numbers only.
    Raises ParseError."""
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    check_json(data, limits)
    try:
        given = text if isinstance(text, str) else data.decode("utf-8-sig", "surrogatepass")
        return (_STRICT if strict else _LENIENT).decode(given)
    except RecursionError:
        raise TooLargeError("it is nested too deeply") from None
    except ValueError as error:
        raise ParseError(str(error)) from None


async def parse_json_aside(text: str | bytes, limits: TextLimits, *, strict: bool = False) -> Any:
    """Call `parse_json` off the event loop for a text that takes long. Raises ParseError."""
    return await run_aside(len(text), lambda: parse_json(text, limits, strict=strict))


async def run_aside(size: int, work: Callable[[], T], most: int = ASIDE_BYTES) -> T:
    """Do the work on `size` bytes, in a thread when they are more than `most`."""
    return await asyncio.to_thread(work) if size > most else work()


def check_json(data: bytes, limits: TextLimits) -> None:
    """Raise TooLargeError where a JSON text exceeds the limits.

    Marks inside strings are counted at first as well, which is cheaper and mostly enough."""
    if len(data) > limits.bytes:
        raise TooLargeError(f"it has {len(data)} bytes, more than {limits.bytes}")
    openers = data.count(b"[") + data.count(b"{")
    if _count_marks(data) < limits.values and openers <= limits.depth:
        return
    structure = _outside_strings(data, limits)
    if _count_marks(structure) >= limits.values:
        raise _too_many(limits)
    if _is_deeper(structure, limits.depth):
        raise TooLargeError(f"it is nested more than {limits.depth} deep")


def parse_literal(text: str, limits: TextLimits) -> Any:
    """Return the value of a Python literal, such as a list that was printed. Raises ParseError."""
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > limits.bytes:
        raise TooLargeError(f"it has {size} bytes, more than {limits.bytes}")
    if text.count(",") >= limits.values:
        raise _too_many(limits)
    try:
        with _ONE_AT_A_TIME, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ParseError(f"it is no literal: {error!r}"[:500]) from None


def parse_integer(digits: str) -> int:
    """Parse an integer of JSON, of up to 512 digits. Raises ValueError."""
    if len(digits) > _DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits is too long; {_DIGITS} are allowed")
    return int(digits)


def make_unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of JSON, in one pass. Raises ValueError for a key that is repeated."""
    result = dict(pairs)
    if len(result) == len(pairs):
        return result
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise ValueError(f"the key {name[:_SHOWN]!r} is repeated")
        seen.add(name)
    raise AssertionError("a key is missing and none is repeated")


def _count_marks(data: bytes) -> int:
    return sum(data.count(mark) for mark in _STRUCTURE)


def _outside_strings(data: bytes, limits: TextLimits) -> bytes:
    """Return a JSON text without its strings.

    The result is exact as far as the text is JSON, which is as far as a parser reads. Raises
    TooLargeError when there are more strings than values allowed."""
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 2 * limits.values:
        raise _too_many(limits)
    return b"".join(plain.split(b'"')[::2])


def _is_deeper(structure: bytes, depth: int) -> bool:
    """Return True if brackets nest deeper: each pass takes away the innermost."""
    left = structure.translate(_BRACKETS, _NO_BRACKETS)
    for _ in range(depth):
        if b"[]" not in left:
            break
        left = left.replace(b"[]", b"")
    return b"[]" in left or left.count(b"[") > depth


def _too_many(limits: TextLimits) -> TooLargeError:
    return TooLargeError(f"it holds more than {limits.values} values")


def _parse_finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:_SHOWN]} is too large for a number")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


# Made once: a decoder costs more than a small object to decode.
_LENIENT = json.JSONDecoder(parse_int=parse_integer)
_STRICT = json.JSONDecoder(
    object_pairs_hook=make_unique_object,
    parse_constant=_refuse_constant,
    parse_int=parse_integer,
    parse_float=_parse_finite,
)
