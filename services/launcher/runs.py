"""The life of a run, pure: what is known of it and wanted of it, and the facts that change that.

The clock is an argument. `decide.py` compares what is known with what is wanted.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

LEARNER, ROLLOUT, GATEWAY = "learner", "rollout", "env_gateway"
SERVICES = (GATEWAY, LEARNER, ROLLOUT)
# Rollouts go first: they hand leases back to the learner and close episodes at the gateway.
DRAIN_STAGES: tuple[frozenset[str], ...] = (frozenset({ROLLOUT}), frozenset({LEARNER, GATEWAY}))
# The phase a learner reports when nothing is left to do.
PHASE_DONE = "done"
EXIT_BAD_CONFIG = 2
# A kill that has not ended a process is repeated after this long.
KILL_AGAIN_S = 2.0

Key = tuple[str, int]


class RunState(StrEnum):
    """Where a run is on its way."""

    PREFLIGHT = "preflight"
    PROVISIONING = "provisioning"
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    TEARDOWN = "teardown"
    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def ended(self) -> bool:
        return self in (RunState.COMPLETED, RunState.FAILED, RunState.STOPPED)


class Outcome(StrEnum):
    """Why a run ended, whatever became of its machines."""

    NONE = ""
    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"
    BUDGET = "budget"
    DEADLINE = "deadline"
    CAPACITY = "capacity"


class Cleanup(StrEnum):
    """What became of a run's machines, whatever the outcome."""

    PENDING = "pending"
    VERIFYING = "verifying"
    VERIFIED = "verified"
    LEAK_SUSPECTED = "leak_suspected"


@dataclass(frozen=True, slots=True)
class Cost:
    """US dollars: spent so far, by service too, and per hour at present."""

    accrued: float = 0.0
    per_hour: float = 0.0
    by_service: Mapping[str, float] = field(default_factory=dict[str, float])


class RunMode(StrEnum):
    """What a run is started for."""

    TRAIN = "train"
    EVAL_ONLY = "eval_only"


class ReplicaState(StrEnum):
    """Where one process of a service is on its way."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        return self in (ReplicaState.STOPPED, ReplicaState.FAILED)


@dataclass(frozen=True, slots=True)
class Unit:
    """One started replica as its backend finds it again: by name, by (pid, start time), by `ref`.

    `ref` is the backend's own: a job's number, a cluster's name.
    """

    name: str
    pid: int = 0
    started: float = 0.0
    ref: str = ""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a unit ended: exit code (negative: killed by that signal) and its last log lines."""

    code: int
    tail: str = ""


@dataclass(frozen=True, slots=True)
class Replica:
    """One process of a service.

    `due` depends on the state. STARTING: must serve by then; RESTARTING: start again then;
    DRAINING: killed then. `failures` are the times of recent failures.
    """

    service: str
    index: int
    state: ReplicaState = ReplicaState.STARTING
    unit: Unit | None = None
    phase: str = ""
    address: str = ""
    restarts: int = 0
    failures: tuple[float, ...] = ()
    due: float = 0.0
    # When it was last killed in vain.
    killed: float = -KILL_AGAIN_S

    @property
    def key(self) -> Key:
        return (self.service, self.index)

    @property
    def label(self) -> str:
        return f"{self.service}-{self.index}"


@dataclass(frozen=True, slots=True)
class Policy:
    """How patient the launcher is, in seconds and counts."""

    max_restarts: int = 5
    restart_window_s: float = 600.0
    backoff_s: float = 1.0
    backoff_max_s: float = 30.0
    start_timeout_s: float = 600.0
    drain_s: float = 60.0

    def backoff(self, failures: int) -> float:
        return min(self.backoff_max_s, self.backoff_s * 2 ** (failures - 1))


@dataclass(frozen=True, slots=True)
class Run:
    """What is known of a run and what is wanted of it.

    `goal` is the end it drains towards, `drain_by` when draining is over at the latest.
    """

    run_id: str
    name: str
    wanted: Mapping[str, int]
    mode: RunMode = RunMode.TRAIN
    state: RunState = RunState.PREFLIGHT
    goal: RunState | None = None
    drain_by: float = 0.0
    error: str = ""
    replicas: Mapping[Key, Replica] = field(default_factory=dict[Key, Replica])

    def of(self, service: str) -> list[Replica]:
        """The replicas of a service in order of their index."""
        found = [replica for replica in self.replicas.values() if replica.service == service]
        return sorted(found, key=lambda replica: replica.index)

    def put(self, replicas: Iterable[Replica]) -> "Run":
        changed = {replica.key: replica for replica in replicas}
        return replace(self, replicas={**self.replicas, **changed})


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process for this replica."""

    key: Key


@dataclass(frozen=True, slots=True)
class Drain:
    """Ask this replica to finish and exit."""

    key: Key


@dataclass(frozen=True, slots=True)
class Kill:
    """End this replica and all its children now."""

    key: Key


@dataclass(frozen=True, slots=True)
class Note:
    """Something that people want to read in the run's events."""

    text: str


Action = Start | Drain | Kill | Note


def started(run: Run, key: Key, unit: Unit) -> Run:
    """The backend has started this replica."""
    return run.put([replace(run.replicas[key], unit=unit)])


def registered(run: Run, key: Key, address: str) -> Run:
    """This replica has announced where it serves. Unknown replicas are none of the run's."""
    if key not in run.replicas:
        return run
    return run.put([replace(run.replicas[key], address=address)])


def beat(run: Run, key: Key, phase: str, serving: bool) -> Run:
    """This replica says that it is alive; serving for the first time ends its start."""
    replica = run.replicas.get(key)
    if replica is None:
        return run
    replica = replace(replica, phase=phase)
    if serving and replica.state is ReplicaState.STARTING:
        replica = replace(replica, state=ReplicaState.RUNNING, due=0.0)
    return run.put([replica])


def exited(run: Run, key: Key, how: Exit, now: float, policy: Policy) -> tuple[Run, list[Note]]:
    """This replica's process is gone: by request, at its goal, or by a failure."""
    replica = replace(run.replicas[key], unit=None, address="", killed=-KILL_AGAIN_S)
    if replica.state is ReplicaState.DRAINING or run.state is RunState.DRAINING:
        notes = [Note(f"{replica.label} {describe_exit(how)} while draining")] if how.code else []
        return run.put([replace(replica, state=ReplicaState.STOPPED)]), notes
    if replica.service == LEARNER and how.code == 0 and replica.phase == PHASE_DONE:
        run = run.put([replace(replica, state=ReplicaState.STOPPED)])
        return _drain_towards(run, RunState.COMPLETED, now + policy.drain_s), []
    return _failed(run, replica, how, now, policy)


def _failed(
    run: Run, replica: Replica, how: Exit, now: float, policy: Policy
) -> tuple[Run, list[Note]]:
    recent = [at for at in replica.failures if now - at < policy.restart_window_s]
    failures = (*recent, now)
    replica = replace(replica, failures=failures)
    cause = f"{replica.label} {describe_exit(how)}"
    if how.code != EXIT_BAD_CONFIG and len(failures) <= policy.max_restarts:
        delay = policy.backoff(len(failures))
        replica = replace(replica, state=ReplicaState.RESTARTING, due=now + delay)
        text = f"{cause}; restart {len(failures)} of {policy.max_restarts} in {delay:g} s"
        return run.put([replica]), [Note(text)]
    run = run.put([replace(replica, state=ReplicaState.FAILED)])
    verdict = f"{cause}; gave up after {len(failures)} failures"
    if how.tail:
        verdict = f"{verdict}. Its last lines:\n{how.tail}"
    if all(other.state is ReplicaState.FAILED for other in run.of(replica.service)):
        return fail(run, verdict, now, policy), [Note(verdict)]
    return run, [Note(verdict)]


def describe_exit(how: Exit) -> str:
    """`exited with code 3` or `was killed by signal 9`."""
    if how.code < 0:
        return f"was killed by signal {-how.code}"
    return f"exited with code {how.code}"


def fail(run: Run, error: str, now: float, policy: Policy) -> Run:
    """Give the run up for this cause, draining what still runs."""
    if run.state is RunState.DRAINING or run.state.ended:
        return run
    return _drain_towards(replace(run, error=error), RunState.FAILED, now + policy.drain_s)


def stop(run: Run, now: float, grace_s: float) -> Run:
    """End the run by request. On a draining run this can only shorten what is left."""
    if run.state.ended:
        return run
    if run.state is RunState.DRAINING:
        return replace(run, drain_by=min(run.drain_by, now + grace_s))
    return _drain_towards(run, RunState.STOPPED, now + grace_s)


def _drain_towards(run: Run, goal: RunState, by: float) -> Run:
    return replace(run, state=RunState.DRAINING, goal=goal, drain_by=by)


def scale(run: Run, service: str, replicas: int) -> Run:
    """Wish for this many replicas of a service."""
    return replace(run, wanted={**run.wanted, service: replicas})
