"""Conversion between runs and the ledger's rows."""

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from services.launcher.run_progress import Alarm
from services.launcher.state import (
    Cleanup,
    Cost,
    Outcome,
    Replica,
    ReplicaState,
    Run,
    RunMode,
    RunState,
    Unit,
)


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


def stored_run_from_row(row: sqlite3.Row, replicas: list[Replica]) -> StoredRun:
    run = Run(
        run_id=row["run_id"],
        name=row["name"],
        wanted=json.loads(row["wanted_json"]),
        mode=RunMode(row["mode"]),
        backend=row["backend"],
        state=RunState(row["state"]),
        outcome=Outcome(row["outcome"]),
        drain_by=row["drain_by"],
        cleanup=Cleanup(row["cleanup"]),
        cleanup_detail=row["cleanup_detail"],
        cleanings=row["cleanings"],
        clean_at=row["clean_at"],
        clean_by=row["clean_by"],
        error=row["error"],
        unreachable=row["unreachable"],
        cost=Cost(**json.loads(row["cost_json"])),
        metered=row["metered"],
        replicas={replica.key: replica for replica in replicas},
    )
    return StoredRun(
        run,
        spec_json=row["spec_json"],
        created=row["created"],
        ended=row["ended"],
        metrics=json.loads(row["metrics_json"]),
        begun=row["begun"],
        registry=row["registry"],
        prices=json.loads(row["prices_json"]),
        alarms=tuple(Alarm(**body) for body in json.loads(row["alarms_json"])),
        step=row["step"],
        total_steps=row["total_steps"],
    )


def replica_from_row(row: sqlite3.Row) -> Replica:
    unit = None
    if row["unit"] is not None:
        unit = Unit(row["unit"], row["pid"], row["started"], row["ref"])
    return Replica(
        service=row["service"],
        index=row["replica"],
        state=ReplicaState(row["state"]),
        unit=unit,
        phase=row["phase"],
        address=row["address"],
        metrics_address=row["metrics_address"],
        restarts=row["restarts"],
        failures=tuple(json.loads(row["failures_json"])),
        attempt=row["attempt"],
        setups=row["setups"],
        price=row["price"],
        due=row["due"],
    )
