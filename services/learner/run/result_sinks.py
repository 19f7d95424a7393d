"""Receivers of a run's results."""

from dataclasses import dataclass

from services.learner.alarms.alarms import Alarms
from services.learner.ports import Tracker
from services.learner.run.status import LearnerStatus


@dataclass(frozen=True, slots=True)
class ResultSinks:
    """Receivers of the result of a step or an evaluation."""

    tracker: Tracker
    alarms: Alarms
    status: LearnerStatus
