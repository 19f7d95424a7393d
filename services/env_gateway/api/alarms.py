"""Alarms for the operator, raised from the backends' heartbeats. No I/O; the clock is an
argument, in seconds."""

from collections.abc import Mapping

from services.common.printable_text import one_line
from services.common.run_membership import RaisedAlarm
from services.env_gateway.ports import HeartbeatLateness

LATE_HEARTBEATS = "late_heartbeats"
# The alarm ends when no heartbeat was late for so long.
_CALM_S = 30.0
_CHARACTERS = 300
_FIX = (
    "Its control plane answers too slowly or refuses: see `heartbeats_late` in the log of"
    " env_gateway-0 and flotilla env status; fewer episodes at once"
    " (env_gateway.limits.max_episodes) need fewer heartbeats"
)


class HeartbeatAlarms:
    """One alarm for each backend that may end instances because their heartbeats are late."""

    def __init__(self) -> None:
        # By backend, with the time when one was last late.
        self._raised: dict[str, tuple[RaisedAlarm, float]] = {}

    @property
    def raised(self) -> list[RaisedAlarm]:
        return [alarm for alarm, _ in self._raised.values()]

    def update_alarms(self, found: Mapping[str, HeartbeatLateness], now: float) -> bool:
        """Raise and clear alarms; return True if any changed."""
        before = self.raised
        for backend, lateness in found.items():
            known = self._raised.get(backend)
            if lateness.late:
                self._raised[backend] = (known[0] if known else _make_alarm(backend, lateness), now)
            elif known is not None and now - known[1] >= _CALM_S:
                del self._raised[backend]
        return self.raised != before


def _make_alarm(backend: str, lateness: HeartbeatLateness) -> RaisedAlarm:
    """Build the alarm with figures from the moment of its raising: text that changed every second
    would be a new alarm every second."""
    cause = (
        f"{lateness.late} of {lateness.instances} instances had no heartbeat confirmed for two"
        " thirds of their time, after which the backend ends them"
    )
    if lateness.why:
        cause = f"{cause}: {one_line(lateness.why, _CHARACTERS)}"
    return RaisedAlarm(LATE_HEARTBEATS, backend, "error", 0, cause, _FIX)
