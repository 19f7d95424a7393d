"""Progress of an upload, for the log."""

import threading
import time
from collections import Counter

from flotilla_common.telemetry.log import get_logger

_REPORT_EVERY_S = 10.0
_log = get_logger(__name__)


class UploadReport:
    """Logs the progress of an upload from time to time."""

    def __init__(self, step: int, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._step = step
        self._sent: Counter[str] = Counter()
        self._logged_at = time.monotonic()
        self._turn = threading.Lock()

    def begin(self, name: str) -> None:
        """Start sending a file, possibly again."""
        with self._turn:
            self._sent[name] = 0

    def count_sent(self, name: str, count: int) -> None:
        """Count further bytes of a file."""
        with self._turn:
            self._sent[name] += count
            if time.monotonic() - self._logged_at < _REPORT_EVERY_S:
                return
            self._logged_at = time.monotonic()
            sent = self._sent.total()
        _log.info("uploading", step=self._step, sent_bytes=sent, total_bytes=self.total_bytes)
