"""Writer of a run's changes: its state, its events for people, and log lines with the causes."""

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from flotilla_common.telemetry import log
from flotilla_launcher import clock
from flotilla_launcher.control.actions import RunNote
from flotilla_launcher.run_progress import Progress
from flotilla_launcher.state import Replica, ReplicaKey, Run
from flotilla_launcher.store.ledger import Ledger

_log = log.get_logger(__name__)


class LedgerWriter:
    """Writer of one run's changes. A change that cannot be written is written with the next
    one, so that the run survives a full disk."""

    def __init__(self, store: Ledger, run: Run) -> None:
        self._store = store
        self._written = run
        self._unwritten: list[RunNote] = []
        self.behind = False

    def write_change(
        self, run: Run, notes: list[RunNote], cause: str, starts: Sequence[ReplicaKey]
    ) -> bool:
        """Write a change; return whether it was written. Starts that could not be written are
        dropped, and must be decided again."""
        try:
            write_run_change(
                self._store, self._written, run, [*self._unwritten, *notes], cause, starts
            )
        except sqlite3.Error as error:
            _log.error("cannot write the ledger", run_id=run.run_id, error=str(error))
            if not starts:
                self._unwritten += notes
                self.behind = True
            return False
        self._written, self._unwritten, self.behind = run, [], False
        return True


def write_run_change(
    store: Ledger,
    before: Run,
    run: Run,
    notes: Iterable[RunNote],
    cause: str,
    starts: Iterable[ReplicaKey],
) -> None:
    """Write `run` and the intents of these starts in one transaction."""
    now = clock.now()
    changed = [r for r in run.replicas.values() if before.replicas.get(r.key) != r]
    with store.transaction():
        store.save_run(run, changed, now if run.state.has_ended else None)
        for key in starts:
            attempt = run.replicas[key].attempt
            name = f"{key[0]}-{key[1]}"
            store.operations.record_intent(run.run_id, "start", name, attempt=attempt)
        for replica in changed:
            if _visible_body(before.replicas.get(replica.key)) != _visible_body(replica):
                store.add_event(run.run_id, now, "replica", replica_body(replica))
        for note in notes:
            store.add_event(run.run_id, now, "message", {"text": note.text})
        if before.cost != run.cost:
            store.add_event(run.run_id, now, "cost", asdict(run.cost))
        if before.state is not run.state:
            store.add_event(run.run_id, now, "state", {"state": run.state})
    for note in notes:
        _log.info("run", run_id=run.run_id, note=note.text)
    why = run.unreachable or cause
    for subject, old, new in _list_transitions(before, run, changed):
        _log.info("transition", run_id=run.run_id, subject=subject, old=old, new=new, cause=why)


def write_progress(
    store: Ledger, run_id: str, known: Progress, progress: Progress, now: float
) -> None:
    """Write the progress that a learner reported. Each alarm raised or cleared since the
    `known` progress becomes an event."""
    with store.transaction():
        store.save_progress(run_id, progress)
        store.add_event(run_id, now, "progress", progress.to_dict())
        for change, alarms in (
            ("cleared", [alarm for alarm in known.alarms if alarm not in progress.alarms]),
            ("raised", [alarm for alarm in progress.alarms if alarm not in known.alarms]),
        ):
            for alarm in alarms:
                store.add_event(run_id, now, "alarm", {"change": change, **asdict(alarm)})


def _list_transitions(before: Run, run: Run, changed: list[Replica]) -> list[tuple[str, str, str]]:
    """Return the changes: of the run, its outcome, its cleanup, its backend or a replica's label,
    from the old state to the new one."""
    states = [
        ("run", before.state, run.state),
        ("outcome", before.outcome, run.outcome),
        ("cleanup", before.cleanup, run.cleanup),
        ("backend", before.unreachable and "unreachable", run.unreachable and "unreachable"),
    ]
    for replica in changed:
        known = before.replicas.get(replica.key)
        states.append((replica.label, known.state if known else "", replica.state))
    return [(subject, old, new) for subject, old, new in states if old != new]


def replica_body(replica: Replica) -> dict[str, Any]:
    """Return the body of a replica event."""
    return {
        "service": replica.service,
        "replica": replica.index,
        "state": replica.state,
        "phase": replica.phase,
        "address": replica.address,
        "metrics_address": replica.metrics_address,
        "restarts": replica.restarts,
        "pid": replica.unit.pid if replica.unit else 0,
    }


def _visible_body(replica: Replica | None) -> dict[str, Any] | None:
    """Return the fields whose change makes an event: all but the phase."""
    return None if replica is None else {**replica_body(replica), "phase": ""}
