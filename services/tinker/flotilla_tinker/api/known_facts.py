"""Facts of the base and the engine, for checks of calls."""

import time
from collections.abc import Callable

from flotilla_tinker.ports import FrontDesk
from flotilla_tinker.types import BaseFacts, EngineFacts
from flotilla_tinker.work.desk_errors import Away

_FRESH_S = 10.0


class KnownFacts:
    """The facts, asked for again when they are 10 s old. While a peer is away the last ones count:
    they hardly change, and orders are kept until it is back."""

    def __init__(self, desk: FrontDesk, now: Callable[[], float] = time.monotonic) -> None:
        self._desk = desk
        self._now = now
        self._known: tuple[BaseFacts, EngineFacts] | None = None
        self._asked_s = 0.0

    async def get(self) -> tuple[BaseFacts, EngineFacts]:
        """Return them. Raises Away if they were never known."""
        if self._known is None or self._now() - self._asked_s > _FRESH_S:
            # Before the answer, so that calls do not ask concurrently.
            self._asked_s = self._now()
            try:
                self._known = await self._desk.facts()
            except Away:
                if self._known is None:
                    raise
        return self._known
