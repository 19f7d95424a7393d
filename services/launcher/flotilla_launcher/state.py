"""Known and wanted state of a run. Pure.

`transitions.py` defines how events change the state, `reconcile.py` compares the known state
with the wanted one. The clock is an argument: seconds since the epoch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

LEARNER, ROLLOUT, GATEWAY = "learner", "rollout", "env_gateway"
SERVICES = (GATEWAY, LEARNER, ROLLOUT)
# Rollouts go first: they hand leases back to the learner and close episodes at the gateway.
DRAIN_STAGES: tuple[frozenset[str], ...] = (frozenset({ROLLOUT}), frozenset({LEARNER, GATEWAY}))
# The phase that a learner reports when nothing is left to do.
PHASE_DONE = "done"
# Phases of a learner whose policy is sampled, or is about to be.
SAMPLED_PHASES = frozenset({"publishing", "evaluating", "sampling", "training", PHASE_DONE})
EXIT_BAD_CONFIG = 2
# Wait before repeating a kill that did not end a process.
KILL_AGAIN_S = 2.0
# Launchers search for the remains of a run for this long; after that, people must.
SUSPECTED_FOR_S = 24 * 3600.0

ReplicaKey = tuple[str, int]


class RunState(StrEnum):
    """Stages of a run's life."""

    # It waits for devices of its machine.
    QUEUED = "queued"
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
    """Reason why a run ended, independent of the cleanup of its machines."""

    NONE = ""
    COMPLETED = "completed"
    FAILED = "failed"
    STOPPED = "stopped"
    BUDGET = "budget"
    DEADLINE = "deadline"
    CAPACITY = "capacity"
    # Refused before its services started, or by a service that cannot run as configured.
    REFUSED = "refused"


class Cleanup(StrEnum):
    """State of the cleanup of a run's machines, independent of the outcome."""

    PENDING = "pending"
    VERIFYING = "verifying"
    VERIFIED = "verified"
    LEAK_SUSPECTED = "leak_suspected"


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Tokens that a Tinker service bills: of prompts, sampled, and trained on."""

    prompt: int = 0
    sampled: int = 0
    trained: int = 0

    @property
    def total(self) -> int:
        return self.prompt + self.sampled + self.trained

    def since(self, before: "TokenCount") -> "TokenCount":
        """Return those that came after `before`."""
        return TokenCount(
            self.prompt - before.prompt,
            self.sampled - before.sampled,
            self.trained - before.trained,
        )


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost in US dollars: spent so far, also by service, and per hour at present; with the tokens
    that are part of it."""

    accrued: float = 0.0
    per_hour: float = 0.0
    by_service: Mapping[str, float] = field(default_factory=dict[str, float])
    tokens: TokenCount = TokenCount()


# Final state of a run that was drained towards an outcome.
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
    """Handle by which a backend finds a started replica again: name, (pid, start time)."""

    name: str
    pid: int = 0
    started: float = 0.0

    @property
    def replica_name(self) -> str:
        """Name of the replica, RUN_ID/SERVICE-REPLICA: a unit's may end with #START."""
        return self.name.partition("#")[0]

    @property
    def run_id(self) -> str:
        return self.name.partition("/")[0]


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """Exit of a unit: its exit code (negative: killed by that signal) and its last log
    lines.

    The code is None if it is unknown: the process outlived its launcher. `preempted`: its
    machine was taken away, which is no failure of the unit. `unready`: the setup of its
    machine failed. If it never `began`, `tail` holds the cause."""

    code: int | None
    tail: str = ""
    preempted: bool = False
    unready: bool = False
    began: bool = True

    @property
    def shell_code(self) -> int:
        """The exit code as a shell reports it; 1 if it is unknown."""
        code = 1 if self.code is None else self.code
        return code if code >= 0 else 128 - code


@dataclass(frozen=True, slots=True)
class Replica:
    """One process of a service, and its machine, which may outlive it: then it is started there
    again, or the machine ends too.

    `due` depends on the state. STARTING: must serve by then; RESTARTING: starts again then;
    DRAINING: killed then. `failures` are the times of recent failures. `attempt` is the
    number of the current or next request for a machine. `setups` counts the setups that
    failed since it last served. `price` is the known price of its machines in US dollars per
    hour."""

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
    # Time of the last kill, which did not end it.
    killed: float = -KILL_AGAIN_S
    # The last end of its process that was reported from its machine: the watcher's incarnation and
    # the number of its restarts.
    ended: str = ""
    # Its watcher has reported its own end; the backend may take minutes longer to notice. Not in
    # the ledger: a launcher without that report waits for the backend.
    exited: bool = False

    @property
    def is_live(self) -> bool:
        """True while it is started and costs money."""
        return self.unit is not None

    @property
    def key(self) -> ReplicaKey:
        return (self.service, self.index)

    @property
    def label(self) -> str:
        return f"{self.service}-{self.index}"


@dataclass(frozen=True, slots=True)
class Run:
    """Known and wanted state of a run.

    A draining run drains towards `outcome`, until `drain_by` at the latest. `clean_at` is the
    time of the next search for its remains, `clean_by` that of the last."""

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
    # Of runs that wait for the same devices, the one of the highest priority begins first.
    priority: int = 0
    # Services that are not started before the learner's policy is sampled: machines would be paid
    # for, and starts would be overdue.
    late: tuple[str, ...] = ()
    # Place in the queue, from 1, and what the run waits for; 0 and empty outside of it.
    queue_place: int = 0
    waiting: str = ""
    # Why the backend is unreachable at present; empty if it is reachable.
    unreachable: str = ""
    # URL of the run's page at a tracker; empty if there is none.
    tracker_url: str = ""
    # Cost up to `metered`, and the tokens that each of its processes had reported by then.
    cost: Cost = field(default_factory=Cost)
    metered: float = 0.0
    tokens: Mapping[str, TokenCount] = field(default_factory=dict[str, TokenCount])
    replicas: Mapping[ReplicaKey, Replica] = field(default_factory=dict[ReplicaKey, Replica])

    @property
    def target_state(self) -> RunState | None:
        """Final state of the run, once it is known."""
        return FINAL_STATES.get(self.outcome)

    @property
    def is_ending(self) -> bool:
        return self.state in (RunState.DRAINING, RunState.TEARDOWN) or self.state.has_ended

    @property
    def awaited(self) -> frozenset[str]:
        """The late services that are not to be started yet; what was started once stays."""
        if any(replica.phase in SAMPLED_PHASES for replica in self.replicas_of(LEARNER)):
            return frozenset()
        return frozenset(service for service in self.late if not self.replicas_of(service))

    def replicas_of(self, service: str) -> list[Replica]:
        """Return the replicas of a service in order of their index."""
        found = [replica for replica in self.replicas.values() if replica.service == service]
        return sorted(found, key=lambda replica: replica.index)

    def with_replicas(self, replicas: Iterable[Replica]) -> "Run":
        changed = {replica.key: replica for replica in replicas}
        return replace(self, replicas={**self.replicas, **changed})
