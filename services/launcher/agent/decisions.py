"""A replica on its machine, pure: kept running until it is done, unwanted, or the machine goes.

The clock is an argument. The launcher's permission to go on is a lease: whoever loses touch with
it ends what runs here, so that nothing goes on costing money that nobody knows of.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from services.launcher.control.agent_reports import EXIT_PREEMPTED
from services.launcher.ports import UnitPhase
from services.launcher.state import EXIT_BAD_CONFIG, KILL_AGAIN_S, Policy

# What a command to stop leaves a service, which takes 5 seconds at most to clean up.
STOP_S = 7.0
EXIT_SILENCE = 69


class Stage(StrEnum):
    """Where the replica is on its way; what `due` means there."""

    # Nothing runs yet.
    PREPARING = "preparing"
    # Start it then.
    WAITING = "waiting"
    RUNNING = "running"
    # Kill it then.
    DRAINING = "draining"
    OVER = "over"


class Cause(StrEnum):
    """Why it is ended though it is not done."""

    ASKED = "asked"
    PREEMPTED = "preempted"
    SILENCE = "silence"


class Action(StrEnum):
    """What to do with the replica's process."""

    START = "start"
    DRAIN = "drain"
    KILL = "kill"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended: exit code (negative: killed by that signal) and its last log lines."""

    code: int
    tail: str = ""

    @property
    def shell_code(self) -> int:
        """The exit code as a shell says it."""
        return self.code if self.code >= 0 else 128 - self.code


@dataclass(frozen=True, slots=True)
class Watch:
    """What is known of the replica. `renewed` is when the launcher last let it go on."""

    renewed: float
    lease_s: float
    policy: Policy
    stage: Stage = Stage.PREPARING
    due: float = 0.0
    cause: Cause | None = None
    asked: bool = False
    killed: float = -KILL_AGAIN_S
    starts: int = 0
    failures: tuple[float, ...] = ()
    # How its process ended last.
    ending: Ending | None = None

    @property
    def restarts(self) -> int:
        return max(0, self.starts - 1)

    @property
    def phase(self) -> UnitPhase:
        """As the launcher is told."""
        if self.stage is Stage.OVER:
            return UnitPhase.EXITED
        if self.cause is Cause.PREEMPTED:
            return UnitPhase.PREEMPTED
        return UnitPhase.SETUP if self.stage is Stage.PREPARING else UnitPhase.RUNNING

    @property
    def verdict(self) -> Ending:
        """How it ended for good; its cause where it had to."""
        how = self.ending or Ending(0)
        if self.cause is Cause.PREEMPTED:
            return replace(how, code=EXIT_PREEMPTED)
        if self.cause is Cause.SILENCE:
            return replace(how, code=EXIT_SILENCE)
        return how


def decide(watch: Watch, now: float) -> tuple[Watch, Action | None]:
    """What is to be done now."""
    if watch.stage is Stage.OVER:
        return watch, None
    if watch.cause is None and now >= watch.renewed + watch.lease_s:
        watch = end(watch, Cause.SILENCE, now, watch.policy.drain_s)
    if watch.stage is Stage.WAITING and now >= watch.due:
        return replace(watch, stage=Stage.RUNNING, starts=watch.starts + 1), Action.START
    if watch.stage is not Stage.DRAINING:
        return watch, None
    if now >= max(watch.due, watch.killed + KILL_AGAIN_S):
        return replace(watch, killed=now), Action.KILL
    if not watch.asked:
        return replace(watch, asked=True), Action.DRAIN
    return watch, None


def next_due(watch: Watch) -> float | None:
    """When `decide` will next have something to do even if nothing happens."""
    if watch.stage is Stage.DRAINING:
        return max(watch.due, watch.killed + KILL_AGAIN_S)
    lost = watch.renewed + watch.lease_s if watch.cause is None else None
    if watch.stage is Stage.WAITING:
        return watch.due if lost is None else min(watch.due, lost)
    return lost


def prepared(watch: Watch, now: float) -> Watch:
    """The machine has what the replica needs."""
    return watch if watch.stage is not Stage.PREPARING else _wait(watch, now)


def unprepared(watch: Watch, how: Ending) -> Watch:
    """The machine cannot get what the replica needs."""
    return replace(watch, stage=Stage.OVER, ending=how)


def renewed(watch: Watch, asked_at: float, lease_s: float) -> Watch:
    """The launcher has answered what was asked then."""
    return replace(watch, renewed=max(watch.renewed, asked_at), lease_s=lease_s or watch.lease_s)


def end(watch: Watch, cause: Cause, now: float, grace_s: float) -> Watch:
    """End what runs. While it drains, this can only shorten what it has left."""
    if watch.stage is Stage.OVER:
        return watch
    if watch.stage is Stage.DRAINING:
        return replace(watch, due=min(watch.due, now + grace_s))
    if watch.stage is Stage.RUNNING:
        return replace(watch, stage=Stage.DRAINING, cause=cause, due=now + grace_s)
    return replace(watch, stage=Stage.OVER, cause=cause)


def ended(watch: Watch, how: Ending, now: float) -> Watch:
    """Its process, and all that it started, are gone."""
    watch = replace(watch, ending=how)
    if watch.stage is Stage.DRAINING or how.code in (0, EXIT_BAD_CONFIG):
        return replace(watch, stage=Stage.OVER)
    policy = watch.policy
    recent = [at for at in watch.failures if now - at < policy.restart_window_s]
    watch = replace(watch, failures=(*recent, now))
    if len(watch.failures) > policy.max_restarts:
        return replace(watch, stage=Stage.OVER)
    return _wait(watch, now + policy.backoff(len(watch.failures)))


def _wait(watch: Watch, due: float) -> Watch:
    return replace(watch, stage=Stage.WAITING, due=due)
