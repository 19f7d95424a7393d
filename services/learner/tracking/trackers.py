"""Several trackers as one."""

from collections.abc import Mapping, Sequence

from services.learner.ports import TrackedRun, Tracker
from services.learner.types import Histogram


class Trackers:
    """Passes everything to each. Implements `Tracker`."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def open(self, run: TrackedRun) -> None:
        for tracker in self._trackers:
            tracker.open(run)

    def log(
        self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics, histograms)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
