"""Reports from the watchers on other machines. Pure; the newest incarnation wins."""

from collections import deque
from dataclasses import dataclass

from flotilla_launcher.agent_protocol import EXIT_PREEMPTED, UnitPhase, UnitReport
from flotilla_launcher.state import ReplicaKey
from flotilla_launcher.store.roster import (
    MOST_MEMBERS,
    REMEMBERED,
    ReplacedError,
    TooManyMembersError,
)


@dataclass(frozen=True, slots=True)
class _LatestReport:
    incarnation: str
    report: UnitReport


class AgentReports:
    """Latest reports of the watchers of one run."""

    def __init__(self) -> None:
        self._heard: dict[ReplicaKey, _LatestReport] = {}
        self._replaced: deque[str] = deque(maxlen=REMEMBERED)

    def record_report(
        self, key: ReplicaKey, incarnation: str, report: UnitReport
    ) -> UnitReport | None:
        """Record a report and return the previous one. Raises ReplacedError for a watcher
        that has a successor on another machine."""
        if incarnation in self._replaced:
            raise ReplacedError(incarnation)
        known = self._heard.get(key)
        if known is None and len(self._heard) >= MOST_MEMBERS:
            raise TooManyMembersError(f"{len(self._heard)} machines have reported already")
        self._heard[key] = _LatestReport(incarnation, report)
        if known is None or known.incarnation == incarnation:
            return known.report if known else None
        self._replaced.append(known.incarnation)
        return None

    def last_report(self, key: ReplicaKey) -> UnitReport | None:
        """Return the last report from a replica's newest watcher."""
        known = self._heard.get(key)
        return known.report if known else None

    def forget_replica(self, key: ReplicaKey) -> None:
        """Forget a watcher whose machine is gone or reassigned."""
        known = self._heard.pop(key, None)
        if known is not None:
            self._replaced.append(known.incarnation)


def describe_report(key: ReplicaKey, before: UnitReport | None, report: UnitReport) -> str:
    """Describe a report for people; empty if it contains nothing new."""
    label = f"{key[0]}-{key[1]}"
    if before is not None and report.restarts > before.restarts:
        return f"{label} was started again on {report.hostname} ({report.restarts})"
    if before is not None and before.phase is report.phase:
        return ""
    # A watcher may drain before it reports PREEMPTED.
    preempted = report.exit is not None and report.exit.code == EXIT_PREEMPTED
    lost = preempted and (before is None or before.phase is not UnitPhase.PREEMPTED)
    match UnitPhase.PREEMPTED if lost else report.phase:
        case UnitPhase.SETUP:
            return f"{label} has the machine {report.hostname}"
        case UnitPhase.PREEMPTED:
            return f"{label} is losing its machine {report.hostname} and drains"
        case UnitPhase.RUNNING | UnitPhase.WAITING | UnitPhase.EXITED:
            return ""
