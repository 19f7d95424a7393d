"""Conversion between runs and the ledger's rows."""

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pydantic import TypeAdapter

from services.launcher.run_progress import Alarm
from services.launcher.state import Replica, Run, Unit


@dataclass(frozen=True, slots=True)
class RunEvent:
    """One event of a run. `kind`: state | replica | progress | message | alarm | cost;
    `body` is its JSON."""

    number: int
    time: float
    kind: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Transition:
    """One permanent record of a change. `subject`: run | outcome | cleanup | backend, or a
    replica's label."""

    subject: str
    old: str
    new: str
    cause: str
    time: float = 0.0


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


_RUN, _STORED_RUN = TypeAdapter(Run), TypeAdapter(StoredRun)
_REPLICA, _UNIT = TypeAdapter(Replica), TypeAdapter(Unit)
# Columns of a run that change while it runs, in the order of `run_to_values`.
RUN_COLUMNS = (
    *("state", "outcome", "drain_by", "cleanup", "cleanup_detail", "cleanings", "clean_at"),
    *("clean_by", "error", "unreachable", "wanted_json", "cost_json", "metered"),
)
REPLICA_COLUMNS = (
    *("run_id", "service", "replica", "state", "phase", "address", "restarts", "failures_json"),
    *("attempt", "setups", "price", "due", "unit", "pid", "started", "ref", "metrics_address"),
)


def run_to_values(run: Run) -> tuple[Any, ...]:
    cleaning = (run.cleanup, run.cleanup_detail, run.cleanings, run.clean_at, run.clean_by)
    counts = (json.dumps(dict(run.wanted)), json.dumps(asdict(run.cost)), run.metered)
    why = (run.error, run.unreachable)
    return (run.state, run.outcome, run.drain_by, *cleaning, *why, *counts)


def alarms_to_json(alarms: Iterable[Alarm]) -> str:
    return json.dumps([asdict(alarm) for alarm in alarms])


def replica_to_values(run_id: str, replica: Replica) -> tuple[Any, ...]:
    unit = replica.unit
    found = (
        (None, None, None, "") if unit is None else (unit.name, unit.pid, unit.started, unit.ref)
    )
    head = (run_id, replica.service, replica.index, replica.state, replica.phase)
    past = (replica.restarts, json.dumps(replica.failures), replica.attempt, replica.setups)
    last = (replica.price, replica.due, *found, replica.metrics_address)
    return (*head, replica.address, *past, *last)


def stored_run_from_row(row: sqlite3.Row, replicas: Iterable[Replica]) -> StoredRun:
    values = _fields_from_row(row)
    run = _RUN.validate_python({**values, "replicas": {each.key: each for each in replicas}})
    return _STORED_RUN.validate_python({**values, "run": run, "spec_json": row["spec_json"]})


def replica_from_row(row: sqlite3.Row) -> Replica:
    values = _fields_from_row(row)
    name = values.pop("unit")
    unit = None if name is None else _UNIT.validate_python({**values, "name": name})
    return _REPLICA.validate_python({**values, "index": row["replica"], "unit": unit})


def _fields_from_row(row: sqlite3.Row) -> dict[str, Any]:
    """Return a row's values by field; a column NAME_json holds the field NAME as JSON."""
    return {
        name.removesuffix("_json"): json.loads(row[name]) if name.endswith("_json") else row[name]
        for name in row.keys()  # noqa: SIM118 (a row iterates over its values)
    }
