"""Several trackers as one."""

from collections.abc import Sequence

from services.learner.ports import Tracker


class Trackers:
    """Passes everything to each. Implements `Tracker`."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()
