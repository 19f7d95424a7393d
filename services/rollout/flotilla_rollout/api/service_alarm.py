"""The alarm about a service that answers nobody: it tells people what a run waits for. Pure."""

from flotilla_common.process.run_membership import RaisedAlarm
from flotilla_common.text.printable_text import one_line
from flotilla_rollout.work.service_use import ServiceUse

SERVICE_AWAY = "service_away"
# Shorter waits are no news.
_AFTER_S = 60.0
_CHARACTERS = 300
_FIX = (
    "Nothing is lost: work waits for policy.tinker.patience_s, then the run fails and can be"
    " resumed. Correct what the cause names; the log of rollout-0 says every minute what is waited"
    " for"
)


def list_alarms(use: ServiceUse | None, now: float) -> list[RaisedAlarm]:
    """Return the alarm of a wait that has lasted for a minute. It says why the wait began, since
    text that changed would be a new alarm each time."""
    if use is None or use.waiting_s(now) < _AFTER_S:
        return []
    why = one_line(use.first_reason, _CHARACTERS)
    cause = f"the Tinker service has answered nobody for more than a minute: {why}"
    return [RaisedAlarm(SERVICE_AWAY, "all", "warning", 0, cause, _FIX)]
