"""What runs of no run: ended at a launcher's start, and looked for now and then."""

import asyncio
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

from services.common import log
from services.launcher import clock
from services.launcher.control import ledger_writer, prepare_commands
from services.launcher.ports import Backend, BackendUnreachable, Stray
from services.launcher.state import (
    SUSPECTED_FOR_S,
    Cleanup,
    Note,
    Outcome,
    ReplicaState,
    Run,
    RunState,
    Unit,
)
from services.launcher.store.ledger import Store, StoredRun

# How long what a dead launcher left may take to drain.
ORPHAN_GRACE_S = 20.0
_log = log.get_logger(__name__)


async def end_orphans(
    backend: Backend, left: Iterable[StoredRun], taken: Iterable[StoredRun]
) -> list[str]:
    """End what runs here of the runs that were `left`, but of none that was taken over; returns
    the names of that."""
    known = [r.unit for s in left for r in s.run.replicas.values() if r.unit is not None]
    kept = _kept(taken)
    try:
        orphans = [unit for unit in await backend.orphans(known) if not kept(unit)]
        await asyncio.gather(*(backend.end(unit, ORPHAN_GRACE_S) for unit in orphans))
    except BackendUnreachable as error:
        _log.warning("cannot look for orphans", why=str(error))
        return []
    if orphans:
        _log.warning("ended orphans", names=[unit.name for unit in orphans])
    return [unit.name for unit in orphans]


def _kept(taken: Iterable[StoredRun]) -> Callable[[Unit], bool]:
    """Tells units of runs that were taken over from others. A replica whose unit is not known yet
    may be any that carries its name; what a run is being prepared by, the run waits for."""
    units: set[str] = set()
    names: set[str] = set()
    for stored in taken:
        names.add(f"{stored.run.run_id}/{prepare_commands.NAME}")
        for replica in stored.run.replicas.values():
            if replica.unit is not None:
                units.add(replica.unit.name)
            elif not replica.state.over:
                names.add(f"{stored.run.run_id}/{replica.label}")
    return lambda unit: unit.name in units or unit.name.partition("#")[0] in names


@dataclass(frozen=True, slots=True)
class Reaped:
    """What a look for leaks has ended or would end, by its name at the backend; the runs of which
    a leak was suspected and nothing is left any more; whom it could not ask, and why."""

    ended: list[str] = field(default_factory=list[str])
    cleared: list[str] = field(default_factory=list[str])
    unreachable: list[str] = field(default_factory=list[str])

    def __add__(self, other: "Reaped") -> "Reaped":
        return Reaped(
            self.ended + other.ended,
            self.cleared + other.cleared,
            self.unreachable + other.unreachable,
        )


async def reap(name: str, backend: Backend, store: Store, active: Collection[str]) -> Reaped:
    """End what a backend runs of no active run, and look again for what ended runs have left.

    `active` changes meanwhile: a run that is begun must not be taken for a stray.
    """
    try:
        ended = await backend.reap(active)
        if ended:
            _log.warning("reaped", backend=name, names=ended)
        suspects = [stored.run for stored in store.suspects(name)]
        cleared = [run.run_id for run in suspects if await _is_gone(run, backend, store, active)]
    except BackendUnreachable as error:
        _log.warning("cannot look for leaks", backend=name, why=str(error))
        return Reaped(unreachable=[f"{name}: {error}"])
    return Reaped(ended, cleared)


async def look(name: str, backend: Backend, store: Store, active: Collection[str]) -> Reaped:
    """What `reap` would end, each with why; ends nothing."""
    try:
        strays = await backend.strays(active)
    except BackendUnreachable as error:
        return Reaped(unreachable=[f"{name}: {error}"])
    return Reaped([f"{stray.name}: {_why(stray, store)}" for stray in strays])


def _why(stray: Stray, store: Store) -> str:
    what = f"{stray.detail}, " if stray.detail else ""
    known = store.get(stray.run_id)
    if known is None:
        return f"{what}of no run that this launcher knows"
    return f"{what}of run {stray.run_id}, which is {known.run.state}"


async def _is_gone(run: Run, backend: Backend, store: Store, active: Collection[str]) -> bool:
    if run.run_id in active:
        # It is going on, and what is there is its own again.
        return False
    evidence = await backend.clean(run.run_id)
    if not evidence.gone or run.run_id in active:
        return False
    sure = replace(run, cleanup=Cleanup.VERIFIED, cleanup_detail=evidence.detail)
    ledger_writer.write(store, run, sure, [Note("no leak: nothing is left")], "reaped", [])
    return True


def left(run: Run) -> Run:
    """A run that no launcher knows any more how to end. What runs of it here is ended as that of no
    run; what it has elsewhere, when it is looked for."""
    if run.backend == "local":
        return run
    return replace(run, cleanup=Cleanup.LEAK_SUSPECTED, cleanup_detail="not looked for yet")


def suspected(store: Store, backends: Iterable[str]) -> bool:
    """Whether a run that ended not long ago may have left something: somebody must look again."""
    ended = [each.ended or 0.0 for name in backends for each in store.suspects(name)]
    return any(clock.now() < at + SUSPECTED_FOR_S for at in ended)


def abandon(store: Store, run: Run, error: str) -> Run:
    """Write down that a run has failed with its launcher, which knows nothing of its remains but
    what `cleanup` says."""
    over = [
        replace(r, state=ReplicaState.STOPPED, unit=None, address="")
        for r in run.replicas.values()
        if not r.state.over
    ]
    ended = replace(run.put(over), state=RunState.FAILED, outcome=Outcome.FAILED, error=error)
    ledger_writer.write(store, run, ended, [Note(error)], error, [])
    return ended
