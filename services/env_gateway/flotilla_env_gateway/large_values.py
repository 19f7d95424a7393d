"""Work on values parsed from outside text, off the event loop if they are large."""

import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

from flotilla_common.text.parsing import ASIDE_BYTES, run_aside

T = TypeVar("T")

# Each value has a fixed cost: writing 4,000 numbers takes as long as writing 64 KiB of text.
_EACH_BYTES = 16
# Not written as unions, which would be made anew for each value.
_TEXT, _ITEMS = (str, bytes), (list, tuple)


async def run_aside_for(value: object, work: Callable[[], T]) -> T:
    """Do the work on a JSON value, in a thread if it is large. The value must not change
    meanwhile."""
    return await run_aside(estimate_size(value), work)


async def dump_json_aside(value: Any) -> bytes:
    """Return a value as JSON. Raises ValueError, TypeError or RecursionError if it cannot be."""
    return await run_aside_for(value, lambda: json.dumps(value).encode())


async def dump_line_aside(value: Any) -> bytes:
    """Return a value as a line of JSON. Raises as `dump_json_aside` does."""
    # The newline is added in the thread too: appending it here would copy the whole line.
    return await run_aside_for(value, lambda: f"{json.dumps(value)}\n".encode())


def estimate_size(value: object) -> int:
    """Return roughly the bytes of a JSON value as text. The count stops above ASIDE_BYTES, so it is
    always quick."""
    size, left = 0, [value]
    while left and size <= ASIDE_BYTES:
        one = left.pop()
        size += _EACH_BYTES
        if isinstance(one, _TEXT):
            size += len(one)
        elif isinstance(one, dict):
            fields = cast("dict[object, object]", one)
            size += len(fields)
            if size <= ASIDE_BYTES:  # a longer one is not even copied
                left += fields
                left += fields.values()
        elif isinstance(one, _ITEMS):
            items = cast("list[object]", one)
            size += len(items)
            if size <= ASIDE_BYTES:
                left += items
    return size
