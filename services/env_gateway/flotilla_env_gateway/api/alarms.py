"""Alarms for the operator, raised from what the backends report. No I/O; the clock is an argument,
in seconds."""

from collections.abc import Mapping

from flotilla_common.process.run_membership import RaisedAlarm
from flotilla_common.text.printable_text import one_line
from flotilla_env_gateway.ports import Backend
from flotilla_env_gateway.tools.tool_drift import TOOLS_CHANGED, VERSION_CHANGED

LATE_HEARTBEATS, REFUSED_KEY = "late_heartbeats", "refused_key"
# An alarm ends when its cause was not there for so long.
_CALM_S = 30.0
# A change happens in a moment, so its alarm lasts.
_CHANGE_SHOWN_S = 600.0
_CHARACTERS = 300
_FIXES = {
    LATE_HEARTBEATS: (
        "Its control plane answers too slowly or refuses: see `heartbeats_late` in the log of"
        " env_gateway-0 and flotilla env status; fewer episodes at once"
        " (env_gateway.limits.max_episodes) need fewer heartbeats"
    ),
    REFUSED_KEY: "Export a valid key and start the run again with --resume: until then its"
    " episodes are lost, not graded",
    TOOLS_CHANGED: "New episodes get the new tools, and groups that saw both are dropped"
    " (failures/group_tools_changed): see `tools_changed` in the log of env_gateway-0. If nobody"
    " meant to change them, put the former server back, and pin its version",
    VERSION_CHANGED: "The run goes on with the new version: see `version_changed` in the log of"
    " env_gateway-0. Pin `version` in the tasks if all are to be played with one",
}


class GatewayAlarms:
    """At most one alarm of each kind: for each backend, instances that may end because their
    heartbeats are late, and a key that the server refuses; for each environment, tools or a version
    that changed."""

    def __init__(self) -> None:
        # By kind and scope, with the time when there was last a cause.
        self._raised: dict[tuple[str, str], tuple[RaisedAlarm, float]] = {}

    @property
    def raised(self) -> list[RaisedAlarm]:
        return [alarm for alarm, _ in self._raised.values()]

    def update_alarms(
        self,
        backends: Mapping[str, Backend],
        changes: Mapping[tuple[str, str], tuple[str, float]],
        now: float,
    ) -> bool:
        """Raise and clear alarms; return True if any changed. `changes`: see `ToolWatch`."""
        before = self.raised
        for name, backend in backends.items():
            self._update_alarm(LATE_HEARTBEATS, name, _late_heartbeats(backend), now)
            self._update_alarm(REFUSED_KEY, name, backend.refused_key, now)
        for (rule, env), (cause, at) in changes.items():
            self._raised.pop((rule, env), None)
            if now - at < _CHANGE_SHOWN_S:
                cause = one_line(cause, _CHARACTERS)
                self._raised[rule, env] = (
                    RaisedAlarm(rule, env, "error", 0, cause, _FIXES[rule]),
                    at,
                )
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
