"""Orphaned resources: terminated when a launcher starts, then scanned for periodically.

When a launcher starts, `list_units` of the local backend finds the processes that an earlier
launcher left on this machine; `_make_kept_filter` below decides which of them to keep.
`reap_orphans` of each backend finds and ends processes and machines of no active run, at once and
then periodically. For clouds, `backends/sky/orphan_names.py` and `orphan_machines.py` decide which
those are.

The gateway deletes orphans of environments (`env_gateway/episodes/instance_deletion.py`)."""

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from flotilla_common.telemetry import log
from flotilla_launcher import clock
from flotilla_launcher.backends.ports import (
    Backend,
    BackendUnreachable,
    CleanupEvidence,
    OrphanResource,
)
from flotilla_launcher.control import ledger_writer, prepare_commands
from flotilla_launcher.control.actions import RunNote
from flotilla_launcher.state import (
    SUSPECTED_FOR_S,
    Cleanup,
    Outcome,
    ReplicaState,
    Run,
    RunState,
    Unit,
)
from flotilla_launcher.store.ledger import Ledger, StoredRun

# Drain time for processes of a dead launcher.
ORPHAN_GRACE_S = 20.0
_log = log.get_logger(__name__)


async def end_orphans(
    backend: Backend, left: Iterable[StoredRun], taken: Iterable[StoredRun]
) -> list[str]:
    """End the local units of those `left` runs that were not taken over; return the names of
    the ended units."""
    known = [r.unit for s in left for r in s.run.replicas.values() if r.unit is not None]
    kept = _make_kept_filter(taken)
    try:
        orphans = [unit for unit in await backend.list_units(known) if not kept(unit)]
        await asyncio.gather(*(backend.end_orphan(unit, ORPHAN_GRACE_S) for unit in orphans))
    except BackendUnreachable as error:
        _log.warning("cannot look for orphans", why=str(error))
        return []
    if orphans:
        _log.warning("ended orphans", names=[unit.name for unit in orphans])
    return [unit.name for unit in orphans]


def _make_kept_filter(taken: Iterable[StoredRun]) -> Callable[[Unit], bool]:
    """Make a filter that keeps the units of runs that were taken over.

    A replica without a known unit may be any unit with its name. The prepare command is kept,
    because its run waits for it."""
    units: set[str] = set()
    names: set[str] = set()
    for stored in taken:
        names.add(f"{stored.run.run_id}/{prepare_commands.PREPARE_NAME}")
        for replica in stored.run.replicas.values():
            if replica.unit is not None:
                units.add(replica.unit.name)
            elif not replica.state.is_over:
                names.add(f"{stored.run.run_id}/{replica.label}")
    return lambda unit: unit.name in units or unit.name.partition("#")[0] in names


@dataclass(frozen=True, slots=True)
class ReapReport:
    """Result of a search for orphans: the names, at the backend, of ended orphans (or of those
    that it would end); the suspected runs now verified to be gone; the unreachable backends,
    each with the cause."""

    ended: list[str] = field(default_factory=list[str])
    cleared: list[str] = field(default_factory=list[str])
    unreachable: list[str] = field(default_factory=list[str])

    def __add__(self, other: "ReapReport") -> "ReapReport":
        return ReapReport(
            self.ended + other.ended,
            self.cleared + other.cleared,
            self.unreachable + other.unreachable,
        )


async def reap_backend(
    name: str, backend: Backend, store: Ledger, active: Collection[str]
) -> ReapReport:
    """End a backend's resources of no active run, and search again for the remains of ended
    runs.

    `active` changes meanwhile: a run that begins must not be taken for an orphan."""
    try:
        ended = await backend.reap_orphans(active)
        if ended:
            _log.warning("reaped", backend=name, names=ended)
        suspects = [stored.run for stored in store.list_suspects(name)]
        cleared = [
            run.run_id for run in suspects if await _verify_gone(run, backend, store, active)
        ]
    except BackendUnreachable as error:
        _log.warning("cannot look for leaks", backend=name, why=str(error))
        return ReapReport(unreachable=[f"{name}: {error}"])
    return ReapReport(ended, cleared)


async def look_for_orphans(
    name: str, backend: Backend, store: Ledger, active: Collection[str]
) -> ReapReport:
    """List what `reap_backend` would end, each with the reason, without ending it."""
    try:
        orphans = await backend.list_orphan_resources(active)
    except BackendUnreachable as error:
        return ReapReport(unreachable=[f"{name}: {error}"])
    return ReapReport([f"{orphan.name}: {_explain_orphan(orphan, store)}" for orphan in orphans])


def _explain_orphan(orphan: OrphanResource, store: Ledger) -> str:
    what = f"{orphan.detail}, " if orphan.detail else ""
    known = store.get_run(orphan.run_id)
    if known is None:
        return f"{what}belongs to no run that this launcher knows"
    return f"{what}belongs to run {orphan.run_id}, which is {known.run.state}"


async def _verify_gone(run: Run, backend: Backend, store: Ledger, active: Collection[str]) -> bool:
    if run.run_id in active:
        # The run was resumed and owns its resources again.
        return False
    evidence = await backend.clean_run(run.run_id)
    if not evidence.gone or run.run_id in active:
        return False
    sure = replace(run, cleanup=Cleanup.VERIFIED, cleanup_detail=evidence.detail)
    ledger_writer.write_run_change(
        store, run, sure, [RunNote("no leak: nothing is left")], "reaped", []
    )
    return True


def mark_suspected(run: Run) -> Run:
    """Mark a run that no launcher can end any more. Its local processes are ended as orphans.
    Resources elsewhere stay suspected until they are searched for."""
    if run.backend == "local":
        return run
    return replace(run, cleanup=Cleanup.LEAK_SUSPECTED, cleanup_detail="not searched for yet")


def has_recent_suspects(store: Ledger, backends: Iterable[str]) -> bool:
    """Return whether a run that ended recently may have left something to search for."""
    ended = [each.ended or 0.0 for name in backends for each in store.list_suspects(name)]
    return any(clock.now() < at + SUSPECTED_FOR_S for at in ended)


async def give_up_run(store: Ledger, backend: Backend, run: Run, error: str) -> Run:
    """Kill what a run has left, and record that it has failed for a reason of its launcher."""
    units = [r.unit for r in run.replicas.values() if r.unit is not None]
    try:
        await asyncio.gather(*(backend.kill_replica(unit) for unit in units))
        evidence = await backend.clean_run(run.run_id)
    except BackendUnreachable as unreachable:
        evidence = CleanupEvidence(False, f"the backend is unreachable: {unreachable}")
    cleanup = Cleanup.VERIFIED if evidence.gone else Cleanup.LEAK_SUSPECTED
    run = replace(run, cleanup=cleanup, cleanup_detail=evidence.detail)
    return abandon_run(store, run, error)


def abandon_run(store: Ledger, run: Run, error: str) -> Run:
    """Record that a run has failed for a reason of its launcher. `run.cleanup` keeps the state
    of its remains."""
    over = [
        replace(r, state=ReplicaState.STOPPED, unit=None, address="")
        for r in run.replicas.values()
        if not r.state.is_over
    ]
    ended = replace(
        run.with_replicas(over), state=RunState.FAILED, outcome=Outcome.FAILED, error=error
    )
    ledger_writer.write_run_change(store, run, ended, [RunNote(error)], error, [])
    return ended
