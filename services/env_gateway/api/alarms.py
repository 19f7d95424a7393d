"""Alarms for the operator, raised from what the backends report. No I/O; the clock is an argument,
in seconds."""

from collections.abc import Mapping

from services.common.printable_text import one_line
from services.common.run_membership import RaisedAlarm
from services.env_gateway.ports import Backend

LATE_HEARTBEATS, REFUSED_KEY = "late_heartbeats", "refused_key"
# An alarm ends when its cause was not there for so long.
_CALM_S = 30.0
_CHARACTERS = 300
_FIXES = {
    LATE_HEARTBEATS: (
        "Its control plane answers too slowly or refuses: see `heartbeats_late` in the log of"
        " env_gateway-0 and flotilla env status; fewer episodes at once"
        " (env_gateway.limits.max_episodes) need fewer heartbeats"
    ),
    REFUSED_KEY: "Export a valid key and start the run again with --resume: until then its"
    " episodes are lost, not graded",
}


class GatewayAlarms:
    """At most one alarm of each kind for each backend: instances that may end because their
    heartbeats are late, and a key that the server refuses."""

    def __init__(self) -> None:
        # By kind and backend, with the time when there was last a cause.
        self._raised: dict[tuple[str, str], tuple[RaisedAlarm, float]] = {}

    @property
    def raised(self) -> list[RaisedAlarm]:
        return [alarm for alarm, _ in self._raised.values()]

    def update_alarms(self, backends: Mapping[str, Backend], now: float) -> bool:
        """Raise and clear alarms; return True if any changed."""
        before = self.raised
        for name, backend in backends.items():
            self._update_alarm(LATE_HEARTBEATS, name, _late_heartbeats(backend), now)
            self._update_alarm(REFUSED_KEY, name, backend.refused_key, now)
        return self.raised != before

    def _update_alarm(self, rule: str, backend: str, cause: str | None, now: float) -> None:
        """Keep the figures from the moment of its raising: text that changed every second would be
        a new alarm every second."""
        key = rule, backend
        known = self._raised.get(key)
        if cause is not None:
            made = RaisedAlarm(rule, backend, "error", 0, cause, _FIXES[rule])
            self._raised[key] = (known[0] if known else made, now)
        elif known is not None and now - known[1] >= _CALM_S:
            del self._raised[key]


def _late_heartbeats(backend: Backend) -> str | None:
    lateness = backend.lateness
    if lateness is None or not lateness.late:
        return None
    cause = (
        f"{lateness.late} of {lateness.instances} instances had no heartbeat confirmed for two"
        " thirds of their time, after which the backend ends them"
    )
    if lateness.why:
        cause = f"{cause}: {one_line(lateness.why, _CHARACTERS)}"
    return cause
