"""Counts of requests, for tests that check what reached the emulator."""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


class InFlight:
    """Number of requests of a kind that are being served, now and at most."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0

    @contextmanager
    def track_one(self) -> Generator[None]:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            yield
        finally:
            self.now -= 1


class Counters:
    """Counts since the start, or since the last `clear`."""

    def __init__(self) -> None:
        self.creates, self.mcp, self.verifiers = InFlight(), InFlight(), InFlight()
        self.clear()

    def clear(self) -> None:
        self.requests: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.injected: Counter[str] = Counter()
        self.tools: Counter[str] = Counter()
        for in_flight in (self.creates, self.mcp, self.verifiers):
            in_flight.most = in_flight.now

    def to_body(self) -> dict[str, Any]:
        """`answers` and `injected` by "OPERATION STATUS"; `tools` are calls that were executed."""
        in_flight = {"creates": self.creates, "mcp": self.mcp, "verifiers": self.verifiers}
        return {
            "requests": dict(sorted(self.requests.items())),
            "answers": dict(sorted(self.answers.items())),
            "injected": dict(sorted(self.injected.items())),
            "tools": dict(sorted(self.tools.items())),
            "in_flight": {name: counted.now for name, counted in in_flight.items()},
            "most_in_flight": {name: counted.most for name, counted in in_flight.items()},
        }
