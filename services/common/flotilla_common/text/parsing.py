"""Parsing of outside text, bounded before anything is built from it.

CPython's parsers hold the interpreter while they run, even in a thread, so a time limit alone comes
too late. Their time and memory depend on how much they build, so that is counted first, at a
gigabyte a second: commas, colons and brackets outside strings, and the depth of nesting.
"""

import ast
import asyncio
import json
import math
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

T = TypeVar("T")

# Larger text is parsed in a thread, where the parser's callbacks let the event loop run.
ASIDE_BYTES = 2**16
# No double has more digits; the time to convert an integer grows with the square of its digits.
_DIGITS = 512
_STRUCTURE = b",:[{"
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SHOWN = 100
# Warning filters are one setting for all threads: two blocks would restore each other's.
_ONE_AT_A_TIME = threading.Lock()


class ParseError(ValueError):
    """The text is malformed; the message gives the place."""


class TooLargeError(ParseError):
    """The text exceeds a limit; the message names it."""


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Bounds of one text: `values` limits values, keys and containers, `depth` the nesting of
    containers."""

    bytes: int
    values: int
    depth: int = 100


def parse_json(text: str | bytes, limits: TextLimits, *, strict: bool = False) -> Any:
    """Return the value of a JSON text; `strict` refuses repeated keys and non-finite numbers.
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


async def parse_json_aside(text: str | bytes, limits: TextLimits) -> Any:
    """Call `parse_json`, off the event loop if the text is long. Raises ParseError."""
    return await run_aside(len(text), lambda: parse_json(text, limits))


async def run_aside(size: int, work: Callable[[], T], most: int = ASIDE_BYTES) -> T:
    """Do the work on `size` bytes, in a thread if they exceed `most`."""
    return await asyncio.to_thread(work) if size > most else work()


def make_plain(value: Any) -> Any:
    """Return a value that a lenient parser has made, as every other reader takes it: NaN and
    infinities are null, and halves of characters, which UTF-8 cannot hold, question marks."""
    text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
    return json.loads(text, parse_constant=lambda _name: None)


def as_object(value: object) -> dict[str, Any]:
    """Return a JSON value if it is an object, else an empty object."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def check_json(data: bytes, limits: TextLimits) -> None:
    """Raise TooLargeError if a JSON text exceeds the limits.

    The first count includes marks inside strings, which is cheaper and mostly enough."""
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
        raise ParseError(f"it is not a literal: {error!r}"[:500]) from None


def parse_integer(digits: str) -> int:
    """Parse a JSON integer of up to 512 digits. Raises ValueError."""
    if len(digits) > _DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits is too long; {_DIGITS} are allowed")
    return int(digits)


def parse_finite(text: str) -> float:
    """Parse a JSON number with a fraction or an exponent. Raises ValueError."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:_SHOWN]} is too large for a number")
    return value


def refuse_constant(name: str) -> NoReturn:
    """Raise ValueError for NaN or Infinity, which are no JSON."""
    raise ValueError(f"{name} is not a JSON number")


def make_unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object in one pass. Raises ValueError for a repeated key."""
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

    The result is exact up to the first syntax error, where a parser stops too. Raises TooLargeError
    if there are more strings than values allowed."""
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 2 * limits.values:
        raise _too_many(limits)
    return b"".join(plain.split(b'"')[::2])


def _is_deeper(structure: bytes, depth: int) -> bool:
    """Return True if brackets nest deeper than `depth`: each pass removes the innermost."""
    left = structure.translate(_BRACKETS, _NO_BRACKETS)
    for _ in range(depth):
        if b"[]" not in left:
            break
        left = left.replace(b"[]", b"")
    return b"[]" in left or left.count(b"[") > depth


def _too_many(limits: TextLimits) -> TooLargeError:
    return TooLargeError(f"it holds more than {limits.values} values")


# Shared, because creating a decoder costs more than decoding a small object.
_LENIENT = json.JSONDecoder(parse_int=parse_integer)
_STRICT = json.JSONDecoder(
    object_pairs_hook=make_unique_object,
    parse_constant=refuse_constant,
    parse_int=parse_integer,
    parse_float=parse_finite,
)
