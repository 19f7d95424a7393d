"""Holds on the groups that open pages show, so that the journal does not prune their tokens."""

import os
import time
from pathlib import Path
from threading import Lock

from flotilla_common.run_folder.holds import MOST_GROUPS, Hold, release_hold, write_hold
from flotilla_common.telemetry.log import get_logger

# An open page renews its hold three times within this time.
HOLD_S = 60.0
_log = get_logger(__name__)


class PageHolds:
    """Holds of one inspector on groups of one run. Usable from several threads."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._name = f"inspector-{os.getpid()}"
        self._lock = Lock()
        self._until: dict[str, float] = {}
        self._failed = False

    def hold(self, group_id: str) -> None:
        """Hold a group for a minute from now. In a read-only folder nothing is held."""
        now = time.time()
        with self._lock:
            self._until.pop(group_id, None)
            self._until[group_id] = now + HOLD_S
            fresh = {group: until for group, until in self._until.items() if until > now}
            self._until = dict(list(fresh.items())[-MOST_GROUPS:])
            try:
                write_hold(self._run_dir, self._name, Hold(now + HOLD_S, None, tuple(self._until)))
            except OSError as error:
                self._report_once(error)

    def release(self) -> None:
        """Release all holds."""
        with self._lock:
            if self._until:
                release_hold(self._run_dir, self._name)
            self._until = {}

    def _report_once(self, error: OSError) -> None:
        if not self._failed:
            _log.warning("holds cannot be written: tokens may be pruned", error=str(error))
        self._failed = True
