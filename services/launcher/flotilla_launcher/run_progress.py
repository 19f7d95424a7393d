"""Progress and alarms of a run, as its replicas report them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from flotilla_launcher.state import LEARNER, ReplicaKey


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm that a replica of `service` has raised. `severity`: notice | warning | error."""

    rule: str
    scope: str = "all"
    severity: str = "warning"
    # The run's step when the alarm was raised.
    step: int = 0
    cause: str = ""
    fix: str = ""
    service: str = LEARNER


@dataclass(frozen=True, slots=True)
class Progress:
    """The run's progress as the learner reports it."""

    phase: str = ""
    step: int = 0
    total_steps: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    # Alarms of all services.
    alarms: tuple[Alarm, ...] = ()
    # URL of the run's page at a tracker.
    tracker_url: str = ""

    def with_metrics_of(self, known: "Progress") -> "Progress":
        """Add metrics that only earlier learners reported: an evaluating learner reports no
        training metrics."""
        return replace(self, metrics={**known.metrics, **self.metrics})

    def to_dict(self) -> dict[str, Any]:
        head = {"phase": self.phase, "step": self.step, "total_steps": self.total_steps}
        return {**head, "metrics": dict(self.metrics)}


class RaisedAlarms:
    """Alarms that the replicas of a run have raised. Each replica reports its own, with
    every heartbeat."""

    def __init__(self, known: Iterable[Alarm]) -> None:
        """Start from the `known` alarms, those reported to an earlier launcher.

        Until the replicas report again, each is attributed to the service's first replica."""
        self._by_replica: dict[ReplicaKey, tuple[Alarm, ...]] = {}
        for alarm in known:
            key = (alarm.service, 0)
            self._by_replica[key] = (*self._by_replica.get(key, ()), alarm)

    @property
    def all_alarms(self) -> tuple[Alarm, ...]:
        """All alarms, the learner's first. Alarms with the same rule and scope appear once:
        several gateways may raise the same."""
        ordered = sorted(self._by_replica, key=lambda key: (key[0] != LEARNER, key))
        named: dict[tuple[str, str], Alarm] = {}
        for key in ordered:
            for alarm in self._by_replica[key]:
                named.setdefault((alarm.rule, alarm.scope), alarm)
        return tuple(named.values())

    def replace_alarms(self, key: ReplicaKey, alarms: Iterable[Alarm], step: int) -> None:
        """Replace the alarms of a replica. Only the learner's alarms carry a step; others get
        the run's `step`."""
        if key[0] == LEARNER:
            self._by_replica[key] = tuple(alarms)
            return
        known = {(a.rule, a.scope): a.step for a in self._by_replica.get(key, ())}
        self._by_replica[key] = tuple(
            replace(a, service=key[0], step=known.get((a.rule, a.scope), step)) for a in alarms
        )

    def drop_alarms(self, key: ReplicaKey) -> None:
        """Drop the alarms of a replica that has ended. A learner's last alarms stay."""
        if key[0] != LEARNER:
            self._by_replica.pop(key, None)
