"""What a teacher may cost, what it has cost, and how fast it is asked."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from flotilla_common.rpc.deadlines import loop_time

_MILLION = 1e6


class TeacherStoppedError(Exception):
    """The teacher is asked no more; the message says why, such as the budget that is reached."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Money for a million tokens of prompts, and of answers."""

    prompt: float = 0.0
    completion: float = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """The most requests, tokens and money; None for no limit."""

    calls: int | None = None
    tokens: int | None = None
    cost: float | None = None

    @property
    def need_usage(self) -> bool:
        return self.tokens is not None or self.cost is not None


@dataclass(slots=True)
class Spending:
    """What was asked for: requests, and the tokens of those of which they are known. `unknown` are
    the requests without: refused, failed, or cut off."""

    calls: int = 0
    prompt: int = 0
    completion: int = 0
    unknown: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.completion

    def cost(self, prices: Prices) -> float:
        return (self.prompt * prices.prompt + self.completion * prices.completion) / _MILLION


def find_spent(spent: Spending, limits: Limits, prices: Prices) -> str:
    """Return which limit is reached; "" if none is. Requests that run meanwhile may exceed it."""
    if limits.calls is not None and spent.calls >= limits.calls:
        return f"--max-calls {limits.calls} is reached"
    if limits.tokens is not None and spent.tokens >= limits.tokens:
        return f"--max-tokens {limits.tokens} is reached"
    if limits.cost is not None and spent.cost(prices) >= limits.cost:
        return f"--max-cost {limits.cost:g} is reached"
    return ""


class RequestPace:
    """Spaces requests evenly, and holds them while the endpoint wants none."""

    def __init__(self, per_minute: float | None, clock: Callable[[], float] = loop_time) -> None:
        self._interval = 60.0 / per_minute if per_minute else 0.0
        self._clock = clock
        self._next = float("-inf")

    async def wait(self) -> None:
        """Wait for the turn of a request."""
        while (left := self._next - self._clock()) > 0:  # noqa: ASYNC110  (only time ends it)
            await asyncio.sleep(left)
        self._next = self._clock() + self._interval

    def hold(self, seconds: float) -> None:
        """Let no request pass for so long."""
        self._next = max(self._next, self._clock() + seconds)
