"""Holds: groups whose tokens the journal must not prune while their pages are open."""

import json
import os
import time
from pathlib import Path
from threading import Lock

from services.common.log import get_logger

FOLDER = "holds"
HOLD_S = 60.0
_MOST_GROUPS = 200
_log = get_logger(__name__)


class PageHolds:
    """The holds of one inspector on the groups that it shows of one run."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FOLDER / f"inspector-{os.getpid()}.json"
        self._lock = Lock()
        self._until: dict[str, float] = {}
        self._failed = False

    def hold(self, group_id: str) -> None:
        """Hold a group for a minute from now. A folder that is not writable holds nothing."""
        now = time.time()
        with self._lock:
            self._until.pop(group_id, None)
            self._until[group_id] = now + HOLD_S
            fresh = {group: until for group, until in self._until.items() if until > now}
            self._until = dict(list(fresh.items())[-_MOST_GROUPS:])
            self._write()

    def release(self) -> None:
        """Hold nothing any more."""
        with self._lock:
            self._until = {}
            self._path.unlink(missing_ok=True)

    def _write(self) -> None:
        text = json.dumps(
            {"steps": None, "groups": list(self._until), "until": max(self._until.values())}
        )
        partial = self._path.with_suffix(".partial")
        try:
            self._path.parent.mkdir(exist_ok=True)
            partial.write_text(text)
            os.replace(partial, self._path)
        except OSError as error:
            if not self._failed:
                _log.warning("the journal may prune what is shown", error=str(error))
            self._failed = True
