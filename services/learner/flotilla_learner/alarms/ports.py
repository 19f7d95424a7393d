"""Port for destinations of alarms."""

from typing import Protocol

from flotilla_learner.alarms.types import Alarm


class AlarmSink(Protocol):
    """Destination of alarms, besides the log."""

    def send_alarm(self, alarm: Alarm) -> None:
        """Forward an alarm. Called from several threads; never blocks, and never raises."""
        ...
