"""Compares what is known of a run with what is wanted of it, and names the actions. Pure.

Level-triggered: calling it twice does no harm, and after any change it is simply called again.
"""

from dataclasses import replace

from services.launcher.control.transitions import torn_down
from services.launcher.state import (
    DRAIN_STAGES,
    KILL_AGAIN_S,
    Action,
    Clean,
    Drain,
    Key,
    Kill,
    Policy,
    Replica,
    ReplicaState,
    Run,
    RunState,
    Start,
)
from services.launcher.store.roster import Command


def decide(run: Run, now: float, policy: Policy) -> tuple[Run, list[Action]]:
    """Compare what is with what is wanted, and say what to do about it."""
    if run.state.ended or run.state is RunState.PREFLIGHT:
        return run, []
    if run.state is RunState.TEARDOWN:
        return run, [Clean()] if now >= run.clean_at else []
    if run.state is RunState.DRAINING:
        run, actions = _advance_drain(run, now, policy)
    else:
        run, actions = _fill(run, now, policy)
        run = _progress(run)
    overdue = [replace(r, killed=now) for r in run.replicas.values() if _to_kill(run, r, now)]
    return run.put(overdue), [*actions, *(Kill(replica.key) for replica in overdue)]


def _to_kill(run: Run, replica: Replica, now: float) -> bool:
    """Drained for too long, or never served. What cannot be asked is not late."""
    late = now >= max(replica.due, replica.killed + KILL_AGAIN_S)
    if replica.state is ReplicaState.STARTING:
        return late and replica.live and not run.unreachable
    return late and replica.state is ReplicaState.DRAINING


def _fill(run: Run, now: float, policy: Policy) -> tuple[Run, list[Action]]:
    """Start what is missing, restart what is due, drain what is too much."""
    actions: list[Action] = []
    for service, wanted in run.wanted.items():
        kept = [r for r in run.of(service) if not _leaving(r)]
        surplus = sorted(kept, key=lambda r: (r.state is not ReplicaState.FAILED, -r.index))
        for replica in surplus[: max(0, len(kept) - wanted)]:
            run, drained = _drain_one(run, replica, now + policy.drain_s)
            actions += drained
        # An index is never used twice: a late word from an old replica must not hit a new one.
        first = max((r.index for r in run.of(service)), default=-1) + 1
        for index in range(first, first + wanted - len(kept)):
            run = run.put([Replica(service, index, due=now + policy.start_timeout_s)])
            actions.append(Start((service, index)))
    for replica in run.replicas.values():
        if replica.state is ReplicaState.RESTARTING and now >= replica.due:
            run = run.put([_restarted(replica, now, policy)])
            actions.append(Start(replica.key))
    return run, actions


def _leaving(replica: Replica) -> bool:
    return replica.state in (ReplicaState.DRAINING, ReplicaState.STOPPED)


def _restarted(replica: Replica, now: float, policy: Policy) -> Replica:
    return replace(
        replica,
        state=ReplicaState.STARTING,
        phase="",
        # Asking for a machine once more, or for another one, is no restart.
        restarts=replica.restarts + (replica.attempt == 1 and not replica.setups),
        due=now + policy.start_timeout_s,
    )


def _drain_one(run: Run, replica: Replica, by: float) -> tuple[Run, list[Action]]:
    """A replica without a process is over at once; its start, if on its way, is drained later."""
    if replica.state in (ReplicaState.RESTARTING, ReplicaState.FAILED):
        return run.put([replace(replica, state=ReplicaState.STOPPED)]), []
    run = run.put([replace(replica, state=ReplicaState.DRAINING, due=by)])
    return run, [Drain(replica.key)]


def _progress(run: Run) -> Run:
    """Move on from PROVISIONING to STARTING to RUNNING; a run that ran once stays RUNNING."""
    if run.state is RunState.RUNNING:
        return run
    live = [r for r in run.replicas.values() if not r.state.over]
    services = {r.service for r in live if r.state is ReplicaState.RUNNING}
    if services >= set(run.wanted):
        return replace(run, state=RunState.RUNNING)
    if all(r.unit is not None for r in live):
        return replace(run, state=RunState.STARTING)
    return replace(run, state=RunState.PROVISIONING)


def _advance_drain(run: Run, now: float, policy: Policy) -> tuple[Run, list[Action]]:
    """Drain stage after stage; when time is up, all of what is left at once. The next stage need
    not wait until a machine whose replica has ended is given back."""
    actions: list[Action] = []
    for number, stage in enumerate(DRAIN_STAGES):
        live = [r for r in run.replicas.values() if r.service in stage and not r.state.over]
        last = number == len(DRAIN_STAGES) - 1
        by = run.drain_by if last else now + max(0.0, run.drain_by - now) / 2
        for replica in live:
            if replica.state is ReplicaState.DRAINING:
                run = run.put([replace(replica, due=min(replica.due, run.drain_by))])
                continue
            run, drained = _drain_one(run, replica, by)
            actions += drained
        if now < run.drain_by and not all(replica.exited for replica in live):
            return run, actions
    if all(replica.state.over for replica in run.replicas.values()) or _in_vain(run, now, policy):
        run = torn_down(run, now, policy)
        actions.append(Clean())
    return run, actions


def _in_vain(run: Run, now: float, policy: Policy) -> bool:
    """Killed for long enough by a backend that answers and does not say that they have ended: what
    is left is for whoever looks for remains, and says so if they stay."""
    return now >= run.drain_by + policy.clean_s and not run.unreachable


def next_due(run: Run, now: float) -> float | None:
    """When `decide` will next have something to do even if nothing happens."""
    timed = (ReplicaState.STARTING, ReplicaState.RESTARTING, ReplicaState.DRAINING)
    waiting = [r for r in run.replicas.values() if r.state in timed]
    dues = [max(r.due, r.killed + KILL_AGAIN_S) for r in waiting]
    if run.state is RunState.DRAINING:
        dues.append(run.drain_by)
    if run.state is RunState.TEARDOWN:
        dues.append(run.clean_at)
    return min((due for due in dues if due > now), default=None)


def command_of(run: Run, key: Key, now: float) -> Command:
    """What a replica is told when it says something."""
    replica = run.replicas.get(key)
    if run.state.ended:
        return Command.STOP
    if replica is None:
        # Somebody started it by hand to help; it goes when the run goes.
        return Command.DRAIN if run.ending else Command.NONE
    if replica.state.over:
        # SkyPilot has given a machine again to what it could not cancel.
        return Command.STOP
    if replica.state is not ReplicaState.DRAINING:
        return Command.NONE
    return Command.STOP if now >= replica.due else Command.DRAIN
