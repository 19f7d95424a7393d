"""State machine of a replica on its machine: it runs until it is done or unwanted, or the machine
is taken away. Pure.

The clock is an argument. The launcher's permission to continue is a lease: a watcher that loses
contact with the launcher ends the replica, so that no forgotten machine keeps costing money."""

from dataclasses import dataclass, replace
from enum import StrEnum

from services.launcher.agent_protocol import EXIT_PREEMPTED, UnitPhase
from services.launcher.config.launcher import LauncherConfig
from services.launcher.state import EXIT_BAD_CONFIG, KILL_AGAIN_S, ExitStatus

# Grace of a stop command; a service takes at most 5 seconds to clean up.
STOP_GRACE_S = 7.0
EXIT_SILENCE = 69


class WatchStage(StrEnum):
    """Stage of the replica; the comments define `due` in each."""

    # No process runs yet.
    PREPARING = "preparing"
    # The start is due then.
    WAITING = "waiting"
    RUNNING = "running"
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
    """Known state of the replica. `renewed` is when the launcher last renewed the lease."""

    renewed: float
    lease_s: float
    config: LauncherConfig
    stage: WatchStage = WatchStage.PREPARING
    due: float = 0.0
    cause: EndCause | None = None
    drain_sent: bool = False
    killed: float = -KILL_AGAIN_S
    starts: int = 0
    failures: tuple[float, ...] = ()
    # Last exit of its process.
    ending: ExitStatus | None = None

    @property
    def restarts(self) -> int:
        return max(0, self.starts - 1)

    @property
    def phase(self) -> UnitPhase:
        """The phase that is reported to the launcher."""
        if self.stage is WatchStage.OVER:
            return UnitPhase.EXITED
        if self.cause is EndCause.PREEMPTED:
            return UnitPhase.PREEMPTED
        return UnitPhase.SETUP if self.stage is WatchStage.PREPARING else UnitPhase.RUNNING

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
        watch = request_end(watch, EndCause.SILENCE, now, watch.config.drain_s)
    if watch.stage is WatchStage.WAITING and now >= watch.due:
        return replace(
            watch, stage=WatchStage.RUNNING, starts=watch.starts + 1
        ), ProcessAction.START
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
    lost = watch.renewed + watch.lease_s if watch.cause is None else None
    if watch.stage is WatchStage.WAITING:
        return watch.due if lost is None else min(watch.due, lost)
    return lost


def mark_prepared(watch: WatchState, now: float) -> WatchState:
    """Record that the machine is ready for the replica."""
    return watch if watch.stage is not WatchStage.PREPARING else _wait_until(watch, now)


def mark_unprepared(watch: WatchState, how: ExitStatus) -> WatchState:
    """Record that the machine cannot be made ready for the replica."""
    return replace(watch, stage=WatchStage.OVER, ending=how)


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


def record_exit(watch: WatchState, how: ExitStatus, now: float) -> WatchState:
    """Record that the process and all its children are gone."""
    watch = replace(watch, ending=how)
    if watch.stage is WatchStage.DRAINING or how.code in (0, EXIT_BAD_CONFIG):
        return replace(watch, stage=WatchStage.OVER)
    config = watch.config
    recent = [at for at in watch.failures if now - at < config.restart_window_s]
    watch = replace(watch, failures=(*recent, now))
    if len(watch.failures) > config.max_restarts:
        return replace(watch, stage=WatchStage.OVER)
    return _wait_until(watch, now + config.restart_delay_s(len(watch.failures)))


def _wait_until(watch: WatchState, due: float) -> WatchState:
    return replace(watch, stage=WatchStage.WAITING, due=due)
