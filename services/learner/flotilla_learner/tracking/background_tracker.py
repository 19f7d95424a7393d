"""Tracker in its own thread, so that a slow or broken one never delays training."""

import queue
import threading
import time
from collections.abc import Mapping

from flotilla_common.telemetry.log import get_logger
from flotilla_learner.ports import TrackedRun, Tracker
from flotilla_learner.types import Histogram

_log = get_logger(__name__)
_Point = tuple[int, Mapping[str, float], Mapping[str, Histogram]]


class BackgroundTracker:
    """Passes points to another tracker through a bounded queue. Implements `Tracker`.

    Points that find the queue full, or on which the tracker fails, are lost and counted. The
    loss is logged once, and once more when points get through again."""

    def __init__(
        self, tracker: Tracker, name: str, *, capacity: int = 1024, close_s: float = 30.0
    ) -> None:
        """Create it; `close_s` bounds how long the end of a run waits for the remaining points."""
        self._tracker = tracker
        self._name = name
        self._queue: queue.Queue[_Point | None] = queue.Queue(capacity)
        self._close_s = close_s
        self._thread = threading.Thread(
            target=self._log_queued, name=f"tracker-{name}", daemon=True
        )
        self._lock = threading.Lock()
        self._failing = False
        self.dropped = 0

    def open_run(self, run: TrackedRun) -> str | None:
        url = self._tracker.open_run(run)
        self._thread.start()
        return url

    def log_metrics(
        self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        try:
            self._queue.put_nowait((step, dict(metrics), dict(histograms)))
        except queue.Full:
            self._note_lost(step, "it is slower than the run")

    def close(self) -> None:
        """Wait for the queued points, for a bounded time."""
        if self._thread.ident is None:
            self._tracker.close()
            return
        if not self._stop_thread():
            _log.warning(
                "a tracker does not finish; the newest points may be missing",
                tracker=self._name,
                queued=self._queue.qsize(),
            )
        if self.dropped:
            _log.warning("a tracker lost points", tracker=self._name, points=self.dropped)

    def _stop_thread(self) -> bool:
        deadline = time.monotonic() + self._close_s
        try:
            self._queue.put(None, timeout=self._close_s)
        except queue.Full:
            return False
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _log_queued(self) -> None:
        while (point := self._queue.get()) is not None:
            try:
                self._tracker.log_metrics(*point)
            except Exception as error:  # noqa: BLE001 - vendors raise what they like
                self._note_lost(point[0], repr(error)[:500])
            else:
                self._note_recovered(point[0])
        try:
            self._tracker.close()
        except Exception as error:  # noqa: BLE001 - the same, and the run is over and well
            _log.warning("a tracker failed to close", tracker=self._name, error=repr(error)[:500])

    def _note_lost(self, step: int, why: str) -> None:
        with self._lock:
            self.dropped += 1
            first, self._failing = not self._failing, True
        if first:
            _log.warning(
                "a tracker loses points; training continues without it",
                tracker=self._name,
                since_step=step,
                error=why,
            )

    def _note_recovered(self, step: int) -> None:
        with self._lock:
            again, self._failing = self._failing, False
        if again:
            _log.info(
                "a tracker accepts points again",
                tracker=self._name,
                since_step=step,
                lost=self.dropped,
            )
