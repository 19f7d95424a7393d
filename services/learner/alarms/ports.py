"""Interface to where alarms go."""

from typing import Protocol

from services.learner.alarms.types import Alarm


class AlarmSink(Protocol):
    """Destination of alarms, besides the log."""

    def send_alarm(self, alarm: Alarm) -> None:
        """Pass it on. Called from several threads; never blocks, and never raises."""
        ...

    def close(self) -> None:
        """Wait, a bounded time, until what was sent has gone out."""
        ...
