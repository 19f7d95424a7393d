"""Waiting for what sends no notification: polls with a deadline; a failure names the condition."""

import asyncio
import linecache
import time
from collections.abc import Awaitable, Callable, Generator
from typing import TypeVar

LIMIT_S = 60.0
# Between two looks at what another process answers.
_LOOK_EVERY_S = 0.03

T = TypeVar("T")


async def until(
    reached: Callable[[], object], limit_s: float = LIMIT_S, state: Callable[[], object] = str
) -> None:
    """Wait until a condition holds, while other tasks run. A failure shows `state()`."""
    for pause in _pauses(reached, limit_s, state):
        await asyncio.sleep(pause)


def wait_until(
    reached: Callable[[], object], limit_s: float = LIMIT_S, state: Callable[[], object] = str
) -> None:
    """Wait until a condition holds, in a test without a loop. A failure shows `state()`."""
    for pause in _pauses(reached, limit_s, state):
        time.sleep(pause)


async def until_seen(
    look: Callable[[], Awaitable[T]], reached: Callable[[T], object], limit_s: float = LIMIT_S
) -> T:
    """Look until what is seen is as wished, and return it. A failure shows what was seen last."""
    deadline = time.monotonic() + limit_s
    while not reached(seen := await look()):
        if time.monotonic() > deadline:
            raise _in_vain(reached, limit_s, seen)
        await asyncio.sleep(_LOOK_EVERY_S)
    return seen


def _pauses(
    reached: Callable[[], object], limit_s: float, state: Callable[[], object]
) -> Generator[float]:
    """Yield pauses until the condition holds: as short as a test of something brief needs, and long
    beside a condition that takes time, such as one that reads every process."""
    deadline = time.monotonic() + limit_s
    while True:
        asked = time.monotonic()
        if reached():
            return
        answered = time.monotonic()
        if answered > deadline:
            raise _in_vain(reached, limit_s, state())
        yield min(1.0, max(0.001, 4 * (answered - asked)))


def _in_vain(condition: Callable[..., object], limit_s: float, state: object) -> AssertionError:
    """Make an error with the line of the condition, such as `await until(lambda: run.done())`."""
    code = getattr(condition, "__code__", None)
    where = (code.co_filename, code.co_firstlineno) if code else None
    line = linecache.getline(*where).strip() if where else repr(condition)
    return AssertionError(f"waited {limit_s:g} s in vain for {line}\n{state}")
