"""State machine of a replica on its machine: it runs until it ends, is unwanted, or the machine is
taken away. Pure.

The launcher decides what follows an end. Its permission to continue is a lease: a watcher that
loses contact with the launcher ends the replica, so that no forgotten machine keeps costing money.
The clock is an argument."""

from dataclasses import dataclass, replace
from enum import StrEnum

from flotilla_launcher.agent_protocol import EXIT_PREEMPTED, UnitPhase
from flotilla_launcher.state import KILL_AGAIN_S, ExitStatus

# Grace of a stop command; a service takes at most 5 seconds to clean up.
STOP_GRACE_S = 7.0
EXIT_SILENCE = 69


class WatchStage(StrEnum):
    """Stage of the replica."""

    # No process runs yet.
    PREPARING = "preparing"
    # To be started.
    READY = "ready"
    RUNNING = "running"
    # It has ended, or the machine could not be prepared: the launcher's command is awaited.
    WAITING = "waiting"
    # The kill is due then.
    DRAINING = "draining"
    OVER = "over"


class EndCause(StrEnum):
    """Reason for ending a replica that is not done."""

    ASKED = "asked"
    PREEMPTED = "preempted"
    SILENCE = "silence"


class ProcessAction(StrEnum):
    """Step to take with the replica's process."""

    START = "start"
    DRAIN = "drain"
    KILL = "kill"


@dataclass(frozen=True, slots=True)
class WatchState:
    """Known state of the replica. `renewed` is when the launcher last renewed the lease; `due` is
    when a DRAINING replica is killed."""

    renewed: float
    lease_s: float
    drain_s: float
    stage: WatchStage = WatchStage.PREPARING
    prepared: bool = False
    due: float = 0.0
    cause: EndCause | None = None
    drain_sent: bool = False
    killed: float = -KILL_AGAIN_S
    # Commands to start again.
    restarts: int = 0
    # Last exit of its process.
    ending: ExitStatus | None = None

    @property
    def phase(self) -> UnitPhase:
        """The phase that is reported to the launcher."""
        if self.stage is WatchStage.OVER:
            return UnitPhase.EXITED
        if self.cause is EndCause.PREEMPTED:
            return UnitPhase.PREEMPTED
        phases = {WatchStage.PREPARING: UnitPhase.SETUP, WatchStage.WAITING: UnitPhase.WAITING}
        return phases.get(self.stage, UnitPhase.RUNNING)

    @property
    def verdict(self) -> ExitStatus:
        """The replica's final exit; its code gives the cause if the watcher ended it."""
        how = self.ending or ExitStatus(0)
        if self.cause is EndCause.PREEMPTED:
            return replace(how, code=EXIT_PREEMPTED)
        if self.cause is EndCause.SILENCE:
            return replace(how, code=EXIT_SILENCE)
        return how


def decide_action(watch: WatchState, now: float) -> tuple[WatchState, ProcessAction | None]:
    """Return the state and the action that is due now, if any."""
    if watch.stage is WatchStage.OVER:
        return watch, None
    if watch.cause is None and now >= watch.renewed + watch.lease_s:
        watch = request_end(watch, EndCause.SILENCE, now, watch.drain_s)
    if watch.stage is WatchStage.READY:
        return replace(watch, stage=WatchStage.RUNNING), ProcessAction.START
    if watch.stage is not WatchStage.DRAINING:
        return watch, None
    if now >= max(watch.due, watch.killed + KILL_AGAIN_S):
        return replace(watch, killed=now), ProcessAction.KILL
    if not watch.drain_sent:
        return replace(watch, drain_sent=True), ProcessAction.DRAIN
    return watch, None


def next_due(watch: WatchState) -> float | None:
    """Return when `decide_action` is next due even without an event."""
    if watch.stage is WatchStage.DRAINING:
        return max(watch.due, watch.killed + KILL_AGAIN_S)
    return watch.renewed + watch.lease_s if watch.cause is None else None


def mark_prepared(watch: WatchState) -> WatchState:
    """Record that the machine is ready for the replica."""
    if watch.stage is not WatchStage.PREPARING:
        return watch
    return replace(watch, stage=WatchStage.READY, prepared=True)


def mark_unprepared(watch: WatchState, how: ExitStatus) -> WatchState:
    """Record that the machine could not be made ready for the replica."""
    if watch.stage is not WatchStage.PREPARING:
        return watch
    return replace(watch, stage=WatchStage.WAITING, ending=how)


def grant_start(watch: WatchState) -> WatchState:
    """Obey a command to start again; one that comes twice is obeyed once."""
    if watch.stage is not WatchStage.WAITING:
        return watch
    stage = WatchStage.READY if watch.prepared else WatchStage.PREPARING
    return replace(watch, stage=stage, restarts=watch.restarts + 1)


def renew_lease(watch: WatchState, sent_at: float, lease_s: float) -> WatchState:
    """Renew the lease: the launcher has answered the report sent at `sent_at`."""
    return replace(watch, renewed=max(watch.renewed, sent_at), lease_s=lease_s or watch.lease_s)


def request_end(watch: WatchState, cause: EndCause, now: float, grace_s: float) -> WatchState:
    """Begin to end the replica. If it already drains, this can only shorten its grace."""
    if watch.stage is WatchStage.OVER:
        return watch
    if watch.stage is WatchStage.DRAINING:
        return replace(watch, due=min(watch.due, now + grace_s))
    if watch.stage is WatchStage.RUNNING:
        return replace(watch, stage=WatchStage.DRAINING, cause=cause, due=now + grace_s)
    return replace(watch, stage=WatchStage.OVER, cause=cause)


def record_exit(watch: WatchState, how: ExitStatus) -> WatchState:
    """Record that the process and all its children are gone."""
    draining = watch.stage is WatchStage.DRAINING
    return replace(watch, ending=how, stage=WatchStage.OVER if draining else WatchStage.WAITING)
