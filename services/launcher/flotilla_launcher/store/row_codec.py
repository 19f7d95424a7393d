"""Conversion between runs and the ledger's rows."""

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from flotilla_launcher.run_progress import Alarm
from flotilla_launcher.state import Replica, Run


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One event of a run. `kind`: state | replica | progress | message | alarm | cost;
    `body` is its JSON."""

    number: int
    time: float
    kind: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run as stored in the ledger. Times are seconds since the epoch.

    `begun` is its newest start, `created` its first.
    """

    run: Run
    spec_json: str
    created: float
    ended: float | None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    begun: float = 0.0
    registry: str = ""
    prices: Mapping[str, float] = field(default_factory=dict[str, float])
    alarms: tuple[Alarm, ...] = ()
    step: int = 0
    total_steps: int = 0


_RUN, _STORED_RUN, _REPLICA = TypeAdapter(Run), TypeAdapter(StoredRun), TypeAdapter(Replica)
# A successor of this launcher does not know these of a replica.
_UNSTORED = {"killed", "exited"}


def run_to_json(run: Run) -> str:
    """Return a run as JSON, without its replicas."""
    return _RUN.dump_json(run, exclude={"replicas"}).decode()


def replica_to_json(replica: Replica) -> str:
    return _REPLICA.dump_json(replica, exclude=_UNSTORED).decode()


def alarms_to_json(alarms: Iterable[Alarm]) -> str:
    return json.dumps([asdict(alarm) for alarm in alarms])


def stored_run_from_row(row: sqlite3.Row, replicas: Iterable[sqlite3.Row]) -> StoredRun:
    known = [_REPLICA.validate_json(each["replica_json"]) for each in replicas]
    run = replace(_RUN.validate_json(row["run_json"]), replicas={each.key: each for each in known})
    read = {name: json.loads(row[f"{name}_json"]) for name in ("metrics", "prices", "alarms")}
    return _STORED_RUN.validate_python({**dict(row), **read, "run": run})
