"""Events of a run and the state changes that they cause. Pure; the clock is an argument."""

from dataclasses import replace

from flotilla_launcher.backends.ports import QueuePlace
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.control.actions import RunNote
from flotilla_launcher.state import (
    ReplicaKey,
    ReplicaState,
    Run,
    RunState,
    Unit,
)


def mark_queued(run: Run, at: QueuePlace) -> tuple[Run, list[RunNote]]:
    """Record the place at which the run waits for its devices."""
    queued = replace(run, state=RunState.QUEUED, queue_place=at.place, waiting=at.reason)
    note = RunNote(f"place {at.place} in the queue: {at.reason}")
    return queued, [note] if queued != run else []


def leave_queue(run: Run, now: float) -> Run:
    """Begin the run, which holds its devices: until now it cost nothing."""
    return replace(run, state=RunState.PREFLIGHT, queue_place=0, waiting="", metered=now)


def mark_admitted(run: Run) -> Run:
    """Admit the run after preflight."""
    return replace(run, state=RunState.PROVISIONING) if run.state is RunState.PREFLIGHT else run


def mark_started(run: Run, key: ReplicaKey, unit: Unit, now: float, config: LauncherConfig) -> Run:
    """Record that the backend has started this replica; its start deadline begins now."""
    replica = replace(run.replicas[key], unit=unit, attempt=1)
    if replica.state is ReplicaState.STARTING:
        replica = replace(replica, due=now + config.start_timeout_s)
    return run.with_replicas([replica])


def extend_start_deadlines(run: Run, now: float, grace_s: float) -> Run:
    """Extend the deadlines of starting replicas after a takeover. A replica that began to serve
    without a launcher gets `grace_s` seconds to report."""
    waiting = [r for r in run.replicas.values() if r.state is ReplicaState.STARTING and r.is_live]
    return run.with_replicas([replace(r, due=max(r.due, now + grace_s)) for r in waiting])


def mark_registered(run: Run, key: ReplicaKey, address: str, metrics_address: str = "") -> Run:
    """Record the address of this replica. Ignore replicas that are not part of the run."""
    if key not in run.replicas:
        return run
    known = run.replicas[key]
    at = replace(known, address=address, metrics_address=metrics_address, exited=False)
    return run.with_replicas([at])


def mark_heartbeat(run: Run, key: ReplicaKey, phase: str, serving: bool) -> Run:
    """Record a heartbeat of this replica; the first serving one ends its start."""
    replica = run.replicas.get(key)
    if replica is None:
        return run
    replica = replace(replica, phase=phase)
    if serving and replica.state is ReplicaState.STARTING:
        replica = replace(replica, state=ReplicaState.RUNNING, setups=0, due=0.0)
    return run.with_replicas([replica])


def set_tracker_url(run: Run, url: str) -> tuple[Run, list[RunNote]]:
    """Record where a tracker shows the run, and announce it; empty if that is not known."""
    if not url or url == run.tracker_url:
        return run, []
    return replace(run, tracker_url=url), [RunNote(f"metrics: {url}")]


def set_replica_price(run: Run, key: ReplicaKey, price: float | None) -> tuple[Run, list[RunNote]]:
    """Set the hourly price of this replica's machines; None if it is unknown."""
    replica = run.replicas.get(key)
    gone = replica is None or replica.state.is_over or replica.state is ReplicaState.RESTARTING
    if replica is None or gone or replica.price == price:
        return run, []
    run = run.with_replicas([replace(replica, price=price)])
    return run, [] if price is None else [RunNote(f"{replica.label} costs ${price:,.2f} an hour")]


def mark_exit_reported(run: Run, key: ReplicaKey) -> Run:
    """Record that this replica's watcher has reported its final exit. The exit status is
    recorded once the backend confirms the end."""
    if key not in run.replicas:
        return run
    return run.with_replicas([replace(run.replicas[key], exited=True)])


def scale_service(run: Run, service: str, replicas: int) -> Run:
    """Set the wanted number of replicas of a service."""
    return replace(run, wanted={**run.wanted, service: replicas})
