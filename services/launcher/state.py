"""State of a run as the launcher sees it: what is known of it and what is wanted of it.
Pure.

`transitions.py` defines how events change the state, `reconcile.py` compares what is known
with what is wanted. The clock is an argument: seconds since the epoch."""

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
# For so long launchers look again for what a run may have left; then it is for people.
SUSPECTED_FOR_S = 24 * 3600.0

ReplicaKey = tuple[str, int]


class RunState(StrEnum):
    """Stages of a run's life."""

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
    def has_ended(self) -> bool:
        return self in (RunState.COMPLETED, RunState.FAILED, RunState.STOPPED)


class Outcome(StrEnum):
    """Reason why a run ended, independent of what became of its machines."""

    NONE = ""
    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"
    BUDGET = "budget"
    DEADLINE = "deadline"
    CAPACITY = "capacity"
    # Before its services were started, or by one that cannot work as it is configured.
    REFUSED = "refused"


class Cleanup(StrEnum):
    """State of the cleanup of a run's machines, independent of the outcome."""

    PENDING = "pending"
    VERIFYING = "verifying"
    VERIFIED = "verified"
    LEAK_SUSPECTED = "leak_suspected"


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost in US dollars: spent so far, also by service, and per hour at present."""

    accrued: float = 0.0
    per_hour: float = 0.0
    by_service: Mapping[str, float] = field(default_factory=dict[str, float])


# The state that a run drained towards an outcome ends in.
FINAL_STATES = {
    Outcome.COMPLETED: RunState.COMPLETED,
    Outcome.FAILED: RunState.FAILED,
    Outcome.REFUSED: RunState.FAILED,
    Outcome.CAPACITY: RunState.FAILED,
    Outcome.STOPPED: RunState.STOPPED,
    Outcome.BUDGET: RunState.STOPPED,
    Outcome.DEADLINE: RunState.STOPPED,
}


class RunMode(StrEnum):
    """Purpose of a run."""

    TRAIN = "train"
    EVAL_ONLY = "eval_only"


class ReplicaState(StrEnum):
    """Stages of one replica's life."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    RESTARTING = "restarting"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        return self in (ReplicaState.STOPPED, ReplicaState.FAILED)


@dataclass(frozen=True, slots=True)
class Unit:
    """One started replica as its backend finds it again: by name, by (pid, start time), by
    `ref`.

    `ref` belongs to the backend: a job's number, a cluster's name."""

    name: str
    pid: int = 0
    started: float = 0.0
    ref: str = ""


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """Exit of a unit: its exit code (negative: killed by that signal) and its last log
    lines.

    The code is None if nobody saw it, as of a process that outlived its launcher.
    `preempted`: its machine was taken away, which is no failure of its own. `unready`: its
    machine was there, and its setup failed. If it never `began`, `tail` says why."""

    code: int | None
    tail: str = ""
    preempted: bool = False
    unready: bool = False
    began: bool = True


@dataclass(frozen=True, slots=True)
class Replica:
    """One process of a service.

    `due` depends on the state. STARTING: must serve by then; RESTARTING: start again then;
    DRAINING: killed then. `failures` are the times of recent failures. `attempt` is the
    number of the request for a machine that is under way or next. `setups` counts the setups
    that failed since it last served. `price` is the price of its machines in US dollars per
    hour, if it is known."""

    service: str
    index: int
    state: ReplicaState = ReplicaState.STARTING
    unit: Unit | None = None
    phase: str = ""
    address: str = ""
    metrics_address: str = ""
    restarts: int = 0
    failures: tuple[float, ...] = ()
    attempt: int = 1
    setups: int = 0
    price: float | None = None
    due: float = 0.0
    # When it was last killed in vain.
    killed: float = -KILL_AGAIN_S
    # Its watcher has said that it ended; the backend may need minutes more to see it. Not in the
    # ledger: a launcher that was not told waits for the backend.
    exited: bool = False

    @property
    def is_live(self) -> bool:
        """True while it is started and incurs cost."""
        return self.unit is not None

    @property
    def key(self) -> ReplicaKey:
        return (self.service, self.index)

    @property
    def label(self) -> str:
        return f"{self.service}-{self.index}"


@dataclass(frozen=True, slots=True)
class LifecyclePolicy:
    """Time limits and retry limits of the launcher, in seconds and counts."""

    max_restarts: int = 5
    restart_window_s: float = 600.0
    backoff_s: float = 1.0
    backoff_max_s: float = 30.0
    start_timeout_s: float = 600.0
    drain_s: float = 60.0
    # Requests for a machine that nobody has, and the wait before the second one.
    attempts: int = 4
    attempt_backoff_s: float = 120.0
    # Machines that may turn out not to become ready.
    setups: int = 2
    # How long it is looked for what an ended run may have left.
    clean_s: float = 600.0

    def restart_delay_s(self, failures: int) -> float:
        return min(self.backoff_max_s, self.backoff_s * 2 ** (failures - 1))

    def attempt_delay_s(self, failures: int) -> float:
        return self.attempt_backoff_s * 2 ** (failures - 1)


@dataclass(frozen=True, slots=True)
class Run:
    """Known and wanted state of a run.

    `outcome` is what it drains towards, `drain_by` is when draining ends at the latest.
    `clean_at` is the time of the next look for its remains, `clean_by` that of the last."""

    run_id: str
    name: str
    wanted: Mapping[str, int]
    mode: RunMode = RunMode.TRAIN
    backend: str = "local"
    state: RunState = RunState.PREFLIGHT
    outcome: Outcome = Outcome.NONE
    drain_by: float = 0.0
    cleanup: Cleanup = Cleanup.PENDING
    cleanup_detail: str = ""
    cleanings: int = 0
    clean_at: float = 0.0
    clean_by: float = 0.0
    error: str = ""
    # Why the backend cannot be asked at present.
    unreachable: str = ""
    # What it cost up to `metered`.
    cost: Cost = field(default_factory=Cost)
    metered: float = 0.0
    replicas: Mapping[ReplicaKey, Replica] = field(default_factory=dict[ReplicaKey, Replica])

    @property
    def target_state(self) -> RunState | None:
        """Final state of the run, once it is known."""
        return FINAL_STATES.get(self.outcome)

    @property
    def is_ending(self) -> bool:
        return self.state in (RunState.DRAINING, RunState.TEARDOWN) or self.state.has_ended

    def replicas_of(self, service: str) -> list[Replica]:
        """Return the replicas of a service in order of their index."""
        found = [replica for replica in self.replicas.values() if replica.service == service]
        return sorted(found, key=lambda replica: replica.index)

    def with_replicas(self, replicas: Iterable[Replica]) -> "Run":
        changed = {replica.key: replica for replica in replicas}
        return replace(self, replicas={**self.replicas, **changed})
