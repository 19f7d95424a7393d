"""Holds, which keep the payloads of groups from being pruned, by this run's dumps and by readers.

Another process that reads payloads, such as an open page, writes `holds/NAME.json` into the run's
folder, {"steps": [first, last] or null, "groups": [...], "until": unix seconds}, and renews it
before `until`. After that a hold is ignored."""

import json
import sqlite3
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.common.files.durable_files import replace_file
from services.common.spec.number_ranges import MOST_STEPS
from services.common.telemetry.log import get_logger
from services.learner.journal.run_progress import planned_step

FOLDER = "holds"
# Most groups kept by one hold, and by all dumps together; the newest ones.
MOST_GROUPS = 200
# Most holds in force at once, and how far ahead one may reach, to limit forgotten ones.
MOST_HOLDS = 16
LONGEST_S = 3600.0
_COUNTED = "state IN ('planned', 'filtered') AND step"
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Hold:
    """Groups that a reader needs: those of steps `steps[0]` to `steps[1]`, and named ones."""

    until: float
    steps: tuple[int, int] | None = None
    groups: tuple[str, ...] = ()


def write_hold(run_dir: Path, name: str, hold: Hold) -> None:
    """Write or renew a hold. Raises OSError."""
    path = _hold_path(run_dir, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(asdict(hold)).encode())


def release_hold(run_dir: Path, name: str) -> None:
    """Remove a hold, if it exists."""
    _hold_path(run_dir, name).unlink(missing_ok=True)


class JournalHolds:
    """All holds on the payloads of one journal. The learner's own dumps set its attributes."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / FOLDER
        self._lock = threading.Lock()
        self._steps: frozenset[int] = frozenset()
        self._evals: frozenset[str] = frozenset()
        # Newest steps whose payloads stay.
        self.kept_steps = 0

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
                hold = _parse_hold(path.read_bytes())
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


def _hold_path(run_dir: Path, name: str) -> Path:
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"hold {name!r}: expected letters, digits, - and _")
    return run_dir / FOLDER / f"{name}.json"


def _parse_hold(data: bytes) -> Hold:
    values: Any = json.loads(data)
    steps, groups = values["steps"], values["groups"]
    pair = (_to_step(steps[0]), _to_step(steps[1])) if steps is not None else None
    return Hold(float(values["until"]), pair, tuple(map(str, groups)))


def _to_step(value: Any) -> int:
    """Return a step within the range of SQLite's integers."""
    return min(max(int(value), 0), MOST_STEPS)


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
