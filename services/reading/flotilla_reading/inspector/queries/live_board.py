"""The live board: groups in flight, the newest tries, and the newest alarms."""

import json
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.run_folder.metric_lines import ALARMS_FILE, read_tail
from flotilla_reading.inspector.queries.group_rows import TryRow, group_rows, with_tries
from flotilla_reading.inspector.queries.run_folders import read_journal

_MOST_GROUPS, _MOST_ARRIVALS, _MOST_ALARMS = 16, 12, 20
_TAIL_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class GroupInFlight:
    """A group in flight: its received attempts, its size, and the worker with its lease."""

    group_id: str
    purpose: str
    task_key: str
    env_key: str
    size: int
    tries: tuple[TryRow, ...]
    worker_id: str

    @property
    def received(self) -> int:
        return len({row.index for row in self.tries if row.reward is not None})


@dataclass(frozen=True, slots=True)
class AlarmLine:
    """One alarm, as it was raised or cleared."""

    time: float
    step: int
    state: str
    name: str
    severity: str
    cause: str
    fix: str


@dataclass(frozen=True, slots=True)
class LiveBoard:
    """Current state of a run. `received` counts the tries in the journal."""

    groups: tuple[GroupInFlight, ...]
    open_groups: int
    waiting_groups: int
    received: int
    arrivals: tuple[TryRow, ...]
    alarms: tuple[AlarmLine, ...]
    made: float


def read_live_board(folder: Path) -> LiveBoard:
    """Read the live board. Raises NotFoundError."""
    with read_journal(folder) as db:
        ids = [
            row[0]
            for row in db.execute(
                "SELECT group_id FROM groups WHERE state = 'open' AND leased = 1"
                " ORDER BY rowid DESC LIMIT ?",
                (_MOST_GROUPS,),
            )
        ]
        counts, received = _count(db)
        groups = tuple(_open_groups(db, ids))
        arrivals = tuple(_newest_tries(db))
    alarms = tuple(read_alarms(folder))
    return LiveBoard(
        groups=groups,
        open_groups=counts.get(1, 0),
        waiting_groups=counts.get(0, 0),
        received=received,
        arrivals=arrivals,
        alarms=alarms,
        made=time.time(),
    )


def read_alarms(folder: Path) -> list[AlarmLine]:
    """Read the newest alarms, newest first."""
    lines = read_tail(folder / ALARMS_FILE, _TAIL_BYTES)
    found = [alarm for line in lines if (alarm := _parse_alarm(line))]
    return found[::-1][:_MOST_ALARMS]


def _count(db: sqlite3.Connection) -> tuple[dict[int, int], int]:
    """Count open groups, leased and not, and the tries in the journal."""
    sql = "SELECT leased, count(*) FROM groups WHERE state = 'open' GROUP BY leased"
    # No row of trajectories is ever removed: the last row number is their count.
    (received,) = db.execute("SELECT coalesce(max(rowid), 0) FROM trajectories").fetchone()
    return dict(db.execute(sql).fetchall()), received


def _open_groups(db: sqlite3.Connection, ids: list[str]) -> list[GroupInFlight]:
    found: list[GroupInFlight] = []
    for row in group_rows(db, ids):
        sql = "SELECT worker_id FROM leases WHERE group_id = ? ORDER BY rowid DESC LIMIT 1"
        worker = db.execute(sql, (row.group_id,)).fetchone()
        tries = with_tries(db, row).tries
        found.append(
            GroupInFlight(
                *(row.group_id, row.purpose, row.task_key, row.env_key, row.size, tries),
                worker_id=worker[0] if worker else "",
            )
        )
    return found


def _newest_tries(db: sqlite3.Connection) -> list[TryRow]:
    sql = "SELECT group_id, attempt_index, try FROM trajectories ORDER BY rowid DESC LIMIT ?"
    keys = [AttemptKey(*row) for row in db.execute(sql, (_MOST_ARRIVALS,))]
    tries = {
        row.key: row
        for group in group_rows(db, sorted({key.group_id for key in keys}))
        for row in with_tries(db, group).tries
    }
    return [tries[key] for key in keys if key in tries]


def _parse_alarm(line: bytes) -> AlarmLine | None:
    try:
        data: dict[str, Any] = json.loads(line)
        scope = str(data["scope"])
        name = str(data["alarm"]) if scope == "all" else f"{data['alarm']} of {scope}"
        return AlarmLine(
            time=float(data["time"]),
            step=int(data["step"]),
            state=str(data["state"]),
            name=name,
            severity=str(data["severity"]),
            cause=str(data["cause"]),
            fix=str(data["fix"]),
        )
    # A line cut off by a kill, or one of another version.
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
