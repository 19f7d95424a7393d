"""Receivers of a run's results."""

from dataclasses import dataclass

from flotilla_learner.alarms.alarms import Alarms
from flotilla_learner.ports import Tracker
from flotilla_learner.run.status import LearnerStatus


@dataclass(frozen=True, slots=True)
class ResultSinks:
    """Receivers of the result of a step or an evaluation."""

    tracker: Tracker
    alarms: Alarms
    status: LearnerStatus
