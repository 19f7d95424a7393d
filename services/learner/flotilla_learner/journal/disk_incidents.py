"""Incidents with files on disk, for the log and for alarms."""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from flotilla_common.telemetry.log import get_logger

_KEPT = 100
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Incident:
    """One case of damage that was found and worked around."""

    # `corrupt_record`, `damaged_checkpoint`, `damaged_mark`, `checkpoint_failed`, `lost_with_disk`,
    # `lost_metrics`.
    kind: str
    text: str


class Incidents:
    """Incidents since this start: counts by kind, and the newest ones."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.newest: deque[Incident] = deque(maxlen=_KEPT)
        self.on_report: Callable[[Incident], None] = lambda incident: None

    def report_incident(self, kind: str, text: str, what: object) -> None:
        """Log an error and keep it. `what` names the damaged item."""
        _log.error(text, incident=kind, what=what)
        self.counts[kind] += 1
        self.newest.append(Incident(kind, f"{text}: {what}"))
        self.on_report(self.newest[-1])
