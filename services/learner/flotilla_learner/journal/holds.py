"""All holds on the payloads of a run's journal: by its own dumps and by readers."""

import sqlite3
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from flotilla_common.run_folder.holds import FOLDER, MOST_GROUPS, Hold, parse_hold
from flotilla_common.telemetry.log import get_logger
from flotilla_learner.journal.run_progress import planned_step

# Most holds in force at once, and how far ahead one may reach, to limit forgotten ones.
MOST_HOLDS = 16
LONGEST_S = 3600.0
_COUNTED = "state IN ('planned', 'filtered') AND step"
_log = get_logger(__name__)


class JournalHolds:
    """All holds on the payloads of one journal. The learner's own dumps set its attributes."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._lock = threading.Lock()
        self._steps: frozenset[int] = frozenset()
        self._evals: frozenset[str] = frozenset()
        # Newest steps whose payloads stay.
        self.kept_steps = 0
        # True if all payloads stay.
        self.keep_all = False

    def set_unwritten(self, steps: Iterable[int], evals: Iterable[str]) -> None:
        """Keep the payloads of steps and evaluations whose dumps are not written yet."""
        with self._lock:
            self._steps, self._evals = frozenset(steps), frozenset(evals)

    def find_groups(self, db: sqlite3.Connection) -> set[str]:
        """Return the groups whose payloads stay; remove expired holds."""
        with self._lock:
            steps, evals = self._steps, self._evals
        found = set(_groups_where(db, f"{_COUNTED} IN {_places(steps)}", tuple(steps)))
        found.update(_groups_where(db, f"eval_id IN {_places(evals)}", tuple(evals)))
        if self.kept_steps:
            newest = planned_step(db)
            found.update(_newest(db, newest - self.kept_steps + 1, newest))
        for hold in self._read_holds(time.time()):
            found.update(hold.groups[:MOST_GROUPS])
            if hold.steps is not None:
                found.update(_newest(db, *hold.steps))
        return found

    def _read_holds(self, now: float) -> Sequence[Hold]:
        found: list[Hold] = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                hold = parse_hold(path.read_bytes())
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
                why = str(error)
                _log.warning("a hold cannot be read and is ignored", path=str(path), why=why)
                _remove(path)
                continue
            if now < hold.until <= now + LONGEST_S:
                found.append(hold)
            else:
                _remove(path)
        return sorted(found, key=lambda hold: hold.until)[-MOST_HOLDS:]


def _remove(path: Path) -> None:
    """Remove a hold; one that cannot be removed is ignored all the same."""
    with suppress(OSError):
        path.unlink()


def _newest(db: sqlite3.Connection, first: int, last: int) -> list[str]:
    """Return the newest groups that steps `first` to `last` counted, at most `MOST_GROUPS`."""
    found = _groups_where(db, f"{_COUNTED} BETWEEN ? AND ?", (first, last))
    return found[:MOST_GROUPS]


def _groups_where(db: sqlite3.Connection, where: str, arguments: tuple[Any, ...]) -> list[str]:
    sql = f"SELECT group_id FROM groups WHERE {where} ORDER BY step DESC, group_id DESC"
    return [group for (group,) in db.execute(sql, arguments)]


def _places(values: Collection[object]) -> str:
    return f"({', '.join('?' * len(values))})"
