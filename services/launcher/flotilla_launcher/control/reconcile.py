"""Reconciliation of a run's known state with its wanted state, into actions. Pure.

It is level-triggered: repeated calls are harmless, and every change triggers one."""

from dataclasses import replace

from flotilla_launcher.agent_protocol import ReplicaCommand
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.control.actions import (
    CleanRun,
    DrainReplica,
    KillReplica,
    RunAction,
    StartReplica,
)
from flotilla_launcher.control.run_end import begin_teardown
from flotilla_launcher.state import (
    DRAIN_STAGES,
    KILL_AGAIN_S,
    Replica,
    ReplicaKey,
    ReplicaState,
    Run,
    RunState,
)


def reconcile_run(run: Run, now: float, config: LauncherConfig) -> tuple[Run, list[RunAction]]:
    """Compare the known state with the wanted one, and return the actions."""
    if run.state.has_ended or run.state in (RunState.QUEUED, RunState.PREFLIGHT):
        return run, []
    if run.state is RunState.TEARDOWN:
        return run, [CleanRun()] if now >= run.clean_at else []
    if run.state is RunState.DRAINING:
        run, actions = _advance_drain(run, now, config)
    else:
        run, actions = _match_wanted(run, now, config)
        run = _advance_start(run)
    overdue = [
        replace(r, killed=now) for r in run.replicas.values() if _must_be_killed(run, r, now)
    ]
    return run.with_replicas(overdue), [
        *actions,
        *(KillReplica(replica.key) for replica in overdue),
    ]


def _must_be_killed(run: Run, replica: Replica, now: float) -> bool:
    """Return whether a replica has drained for too long, or never served. While its backend is
    unreachable, a start is not late."""
    late = now >= max(replica.due, replica.killed + KILL_AGAIN_S)
    if replica.state is ReplicaState.STARTING:
        return late and replica.is_live and not run.unreachable
    return late and replica.state is ReplicaState.DRAINING


def _match_wanted(run: Run, now: float, config: LauncherConfig) -> tuple[Run, list[RunAction]]:
    """Start missing replicas, restart those due, drain surplus ones. Replicas that nothing is
    sampled by yet are not missing."""
    actions: list[RunAction] = []
    awaited = run.awaited
    for service, wanted in run.wanted.items():
        if service in awaited:
            continue
        leaving = (ReplicaState.DRAINING, ReplicaState.STOPPED)
        kept = [r for r in run.replicas_of(service) if r.state not in leaving]
        surplus = sorted(kept, key=lambda r: (r.state is not ReplicaState.FAILED, -r.index))
        for replica in surplus[: max(0, len(kept) - wanted)]:
            run, drained = _drain_one(run, replica, now + config.drain_s)
            actions += drained
        # Never reuse an index: a late message from an old replica must not affect a new one.
        first = max((r.index for r in run.replicas_of(service)), default=-1) + 1
        for index in range(first, first + wanted - len(kept)):
            run = run.with_replicas([Replica(service, index, due=now + config.start_timeout_s)])
            actions.append(StartReplica((service, index)))
    for replica in run.replicas.values():
        if replica.state is ReplicaState.RESTARTING and now >= replica.due:
            run = run.with_replicas([_restart_replica(replica, now, config)])
            # Where the machine stayed, its watcher gets the command in reply to a report.
            if replica.unit is None:
                actions.append(StartReplica(replica.key))
    return run, actions


def _restart_replica(replica: Replica, now: float, config: LauncherConfig) -> Replica:
    return replace(
        replica,
        state=ReplicaState.STARTING,
        phase="",
        # Requesting a machine again, or another one, is no restart.
        restarts=replica.restarts + (replica.attempt == 1 and not replica.setups),
        due=now + config.start_timeout_s,
    )


def _drain_one(run: Run, replica: Replica, by: float) -> tuple[Run, list[RunAction]]:
    """Drain one replica. Without a process it stops at once, and its machine if there is one."""
    if replica.state in (ReplicaState.RESTARTING, ReplicaState.FAILED):
        return run.with_replicas([replace(replica, state=ReplicaState.STOPPED)]), []
    run = run.with_replicas([replace(replica, state=ReplicaState.DRAINING, due=by)])
    return run, [DrainReplica(replica.key)]


def _advance_start(run: Run) -> Run:
    """Advance from PROVISIONING to STARTING to RUNNING; a run that ran once stays RUNNING."""
    if run.state is RunState.RUNNING:
        return run
    live = [r for r in run.replicas.values() if not r.state.is_over]
    services = {r.service for r in live if r.state is ReplicaState.RUNNING}
    if services >= set(run.wanted) - run.awaited:
        return replace(run, state=RunState.RUNNING)
    if all(r.unit is not None for r in live):
        return replace(run, state=RunState.STARTING)
    return replace(run, state=RunState.PROVISIONING)


def _advance_drain(run: Run, now: float, config: LauncherConfig) -> tuple[Run, list[RunAction]]:
    """Drain stage by stage; when time is up, drain all remaining ones at once. The next stage
    does not wait for the machine of an exited replica to be released."""
    actions: list[RunAction] = []
    for number, stage in enumerate(DRAIN_STAGES):
        live = [r for r in run.replicas.values() if r.service in stage and not r.state.is_over]
        last = number == len(DRAIN_STAGES) - 1
        by = run.drain_by if last else now + max(0.0, run.drain_by - now) / 2
        for replica in live:
            if replica.state is ReplicaState.DRAINING:
                run = run.with_replicas([replace(replica, due=min(replica.due, run.drain_by))])
                continue
            run, drained = _drain_one(run, replica, by)
            actions += drained
        if now < run.drain_by and not all(replica.exited for replica in live):
            return run, actions
    all_over = all(replica.state.is_over for replica in run.replicas.values())
    if all_over or _is_kill_futile(run, now, config):
        run = begin_teardown(run, now, config)
        actions.append(CleanRun())
    return run, actions


def _is_kill_futile(run: Run, now: float, config: LauncherConfig) -> bool:
    """Return whether a reachable backend has been killing replicas for too long without
    reporting their end. Their remains are then left to cleanup, which reports any leak."""
    return now >= run.drain_by + config.clean_s and not run.unreachable


def next_reconcile_due(run: Run, now: float) -> float | None:
    """Return when `reconcile_run` is due next without any event; None if never."""
    timed = (ReplicaState.STARTING, ReplicaState.RESTARTING, ReplicaState.DRAINING)
    waiting = [r for r in run.replicas.values() if r.state in timed]
    dues = [max(r.due, r.killed + KILL_AGAIN_S) for r in waiting]
    if run.state is RunState.DRAINING:
        dues.append(run.drain_by)
    if run.state is RunState.TEARDOWN:
        dues.append(run.clean_at)
    return min((due for due in dues if due > now), default=None)


def command_for(run: Run, key: ReplicaKey, now: float, ended: str = "") -> ReplicaCommand:
    """Return the command in reply to a replica's heartbeat, or to the report of its watcher, which
    may be that its process has `ended`."""
    replica = run.replicas.get(key)
    if run.state.has_ended:
        return ReplicaCommand.STOP
    if replica is None:
        # A person started this extra replica by hand; it ends with the run.
        return ReplicaCommand.DRAIN if run.is_ending else ReplicaCommand.NONE
    if replica.state.is_over:
        # SkyPilot gave a machine to a replica that it could not cancel.
        return ReplicaCommand.STOP
    if replica.state is ReplicaState.STARTING and ended and ended == replica.ended:
        return ReplicaCommand.START
    if replica.state is not ReplicaState.DRAINING:
        return ReplicaCommand.NONE
    return ReplicaCommand.STOP if now >= replica.due else ReplicaCommand.DRAIN
