"""Tracker composed of several."""

from collections.abc import Mapping, Sequence

from services.learner.ports import TrackedRun, Tracker
from services.learner.types import Histogram


class CompositeTracker:
    """Passes everything to each of its trackers. Implements `Tracker`."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def open_run(self, run: TrackedRun) -> None:
        for tracker in self._trackers:
            tracker.open_run(run)

    def log_metrics(
        self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        for tracker in self._trackers:
            tracker.log_metrics(step, metrics, histograms)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
