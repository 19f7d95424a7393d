"""What the watchers on other machines say, pure: newest incarnation wins."""

import re
from collections import deque
from dataclasses import dataclass

from services.launcher.ports import UnitPhase, UnitReport
from services.launcher.state import Key
from services.launcher.store.roster import (
    MOST_MEMBERS,
    REMEMBERED,
    ReplacedError,
    TooManyMembersError,
)

# Of a watcher whose machine is taken away.
EXIT_PREEMPTED = 75


def node_key(key: Key, node: int) -> Key:
    """What a machine of a replica is known by: the first one, 0, by the replica's own key. Only
    learners, of which a run has one, have several."""
    return (f"{key[0]}-node", node) if node else key


def is_beside(key: Key, node: int, name: str) -> bool:
    """Whether that is a log which a service may keep beside its own on that machine, as a learner
    does for its ranks: `learner-rank-0`, and `learner-node-1-rank-2` on a further one."""
    service, number = node_key(key, node)
    prefix = f"{service}-{number}" if node else service
    return re.fullmatch(rf"{re.escape(prefix)}-(?!node-)[a-z][a-z0-9-]*", name) is not None


@dataclass(frozen=True, slots=True)
class _Heard:
    incarnation: str
    report: UnitReport


class Units:
    """The watchers of one run."""

    def __init__(self) -> None:
        self._heard: dict[Key, _Heard] = {}
        self._replaced: deque[str] = deque(maxlen=REMEMBERED)

    def take(self, key: Key, incarnation: str, report: UnitReport) -> UnitReport | None:
        """Note a report; returns the one before. Raises ReplacedError for one that has a
        successor on another machine, and TooManyMembersError."""
        if incarnation in self._replaced:
            raise ReplacedError(incarnation)
        known = self._heard.get(key)
        if known is None and len(self._heard) >= MOST_MEMBERS:
            raise TooManyMembersError(f"{len(self._heard)} machines have reported already")
        self._heard[key] = _Heard(incarnation, report)
        if known is None or known.incarnation == incarnation:
            return known.report if known else None
        self._replaced.append(known.incarnation)
        return None

    def last(self, key: Key) -> UnitReport | None:
        """What a replica's newest watcher said last."""
        known = self._heard.get(key)
        return known.report if known else None

    def forget(self, key: Key) -> None:
        """Its machine is gone, or somebody else's by now."""
        known = self._heard.pop(key, None)
        if known is not None:
            self._replaced.append(known.incarnation)


def news(key: Key, before: UnitReport | None, report: UnitReport) -> str:
    """What people want to read of a report; empty when it is nothing new."""
    label = f"{key[0]}-{key[1]}"
    if before is not None and report.restarts > before.restarts:
        return f"{label} was started again on {report.hostname} ({report.restarts})"
    if before is not None and before.phase is report.phase:
        return ""
    # One that drained faster than it was told of.
    preempted = report.exit is not None and report.exit.code == EXIT_PREEMPTED
    lost = preempted and (before is None or before.phase is not UnitPhase.PREEMPTED)
    match UnitPhase.PREEMPTED if lost else report.phase:
        case UnitPhase.SETUP:
            return f"{label} has the machine {report.hostname}"
        case UnitPhase.PREEMPTED:
            return f"{label} loses its machine {report.hostname}, and drains"
        case UnitPhase.RUNNING | UnitPhase.EXITED:
            return ""
