"""Clock of a run: its working time over all starts."""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from flotilla_learner.journal.store import Journal


@dataclass(slots=True)
class RunClock:
    """Seconds of the whole run; `seconds` is journaled and survives a resume."""

    total_before: float = 0.0
    train: float = 0.0
    to_first_step: float | None = None
    _started: float = field(default_factory=time.monotonic)

    def note_step(self, seconds: float) -> None:
        """Record the end of an optimizer step, `seconds` after the one before."""
        self.train += seconds
        if self.to_first_step is None:
            self.to_first_step = self._total_seconds()

    @property
    def seconds(self) -> dict[str, float | None]:
        """Seconds to the end of the first optimizer step, in steps, and in total."""
        first = self.to_first_step
        return {"to_first_step": first, "train": self.train, "total": self._total_seconds()}

    def _total_seconds(self) -> float:
        return self.total_before + time.monotonic() - self._started


async def load_clock(journal: Journal) -> RunClock:
    """Load the clock as earlier starts left it; a new run starts at 0."""
    seconds = (await journal.read_meta()).get("seconds", {})
    return RunClock(
        seconds.get("total") or 0.0, seconds.get("train") or 0.0, seconds.get("to_first_step")
    )


class Stopwatch:
    """Timer of the stages of one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = time.monotonic()

    @contextmanager
    def time_stage(self, name: str) -> Generator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    def end_lap(self) -> tuple[dict[str, float], float]:
        """Return the stages' seconds and the total time since the last lap; start a new lap."""
        now = time.monotonic()
        taken, whole = self.seconds, now - self._started
        self.seconds, self._started = {}, now
        return taken, whole
