"""The gateway's interface to environments and to verifiers, in its own terms."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from flotilla_common.domain.attempts import Grade, ToolOutcome
from flotilla_common.tasks.task_format import Task
from flotilla_common.text.redaction import redact

SqlValue = str | int | float | bytes | None
# The kind of a BackendError that refuses what a task says: its environment, version, data or tools.
BAD_TASK = "bad_task"


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    input_schema_json: str
    read_only: bool = False
    idempotent: bool = False
    # Consecutive calls of an episode may run concurrently; only for reads.
    parallel: bool = False

    @property
    def is_repeatable(self) -> bool:
        """True if a call that may have been executed can safely be sent again."""
        return self.read_only or self.idempotent


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Media:
    """A picture or other binary part. `data` is empty if the bytes must be fetched by hash; `size`
    counts them either way."""

    data: bytes
    mime: str
    sha256: bytes
    size: int
    width: int = 0
    height: int = 0

    def without_data(self) -> "Media":
        return replace(self, data=b"")


Part = Text | Media


@dataclass(frozen=True, slots=True)
class CallResult:
    """The answer to a tool call; with `is_error`, its parts are the error shown to the policy."""

    parts: tuple[Part, ...]
    is_error: bool = False
    reward: float | None = None
    done: bool = False


@dataclass(frozen=True, slots=True)
class PolicyCall:
    """A tool call of the policy: number `seq` of its episode, from 0."""

    seq: int
    tool: Tool
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """What the policy gets for a tool call, after all retries. A part whose media has no `data` is
    fetched by its hash."""

    outcome: ToolOutcome
    parts: tuple[Part, ...] = ()
    reward: float | None = None
    done: bool = False
    attempts: int = 0
    queue_s: float = 0.0
    upstream_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Rows:
    columns: tuple[str, ...]
    rows: Sequence[Sequence[SqlValue]]


class BackendError(Exception):
    """Failure to reach an environment, or its refusal.

    `delivered` is False when the request was certainly not executed and None when that is
    unknown. `lost` means that the instance is gone for good; `invalid` that the same request
    can never succeed; `bad_arguments` that the environment refused the arguments before
    executing anything; `unreachable` that nothing answered, or a proxy instead of the
    environment."""

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        delivered: bool | None,
        retry_after_s: float | None = None,
        lost: bool = False,
        invalid: bool = False,
        bad_arguments: bool = False,
        unreachable: bool = False,
    ) -> None:
        # Workers get the message, and servers repeat what they were sent.
        super().__init__(redact(f"{kind}: {message}"))
        self.kind = kind
        self.delivered = delivered
        self.retry_after_s = retry_after_s
        self.lost = lost
        self.invalid = invalid
        self.bad_arguments = bad_arguments
        self.unreachable = unreachable

    @property
    def is_refusal(self) -> bool:
        """True if nothing was done and a later attempt may succeed: overload, or no server."""
        absent = self.unreachable and self.delivered is False
        return (self.kind == "throttled" or absent) and not (self.lost or self.invalid)


class QueryError(Exception):
    """The database's refusal of a statement; the message is SQLite's."""


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Checks that a verifier returned with its score, out of reach of its printed output."""

    passed: tuple[str, ...]
    failed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Execution:
    """One run of a verifier.

    `error` is the reason why it did not finish; `retryable` is set if another run may differ, `ran`
    if it started at all, `raised` if the error is the verifier's own."""

    result: Any = None
    report: CheckReport | None = None
    stdout: str = ""
    error: str | None = None
    timed_out: bool = False
    instance_lost: bool = False
    retryable: bool = False
    ran: bool = True
    raised: bool = False
    # Named rewards beside the result, as the verifier returned them; None: it returned none.
    rewards: Any = None


@dataclass(frozen=True, slots=True)
class Submission:
    """Input of a grade besides the final state. `conversation` is a JSON array."""

    task: Task
    final_answer: str | None
    conversation: str | None
    # Tools that a verifier may call.
    readable: frozenset[str] = frozenset()
    run_id: str = ""


class Instance(ABC):
    """One running environment. Every method but `close` raises BackendError. The defaults are those
    of an environment that shows nothing but its tools."""

    instance_id: str
    env_version: str
    data_version: str
    # The refusal of every query, where the environment shows no database.
    no_database = "this environment shows no database"
    # False if a grade ends the episode: it cannot be made again.
    regrades = True

    @abstractmethod
    async def list_tools(self, *, timeout_s: float) -> Sequence[Tool]:
        """Return the tools, which proves that the instance is ready."""

    def watch_tools(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever the environment says that its tools are others than it listed."""
        return None

    async def get_first_observation(self, *, timeout_s: float) -> Sequence[Part]:
        """Return the first observation, such as a screenshot; often empty."""
        return ()

    @abstractmethod
    async def call_tool(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> CallResult: ...

    async def grade_submission(
        self, submission: Submission, *, timeout_s: float
    ) -> Execution | None:
        """Grade beside the environment; return None to leave the task's verifier to the gateway.
        After a BackendError it is called again with the same object."""
        return None

    async def settle_call(
        self, call: PolicyCall, answer: Callable[[], Awaitable[CallAnswer]]
    ) -> CallAnswer:
        """Return the policy's answer to a call. A world that is replayed knows it; by default it
        is made, by `answer`. Never raises BackendError."""
        return await answer()

    async def settle_grade(
        self, submission: Submission, grade: Callable[[], Awaitable[Grade]]
    ) -> Grade:
        """Return the grade of an episode, likewise."""
        return await grade()

    async def query_database(
        self, db: str, sql: str, args: Sequence[SqlValue], *, timeout_s: float
    ) -> Rows:
        """Read from the "seed" or the "current" database; QueryError if SQL is at fault."""
        raise QueryError(self.no_database)

    async def snapshot_database(self, db: str, *, timeout_s: float) -> bytes | None:
        """Return the whole database as a SQLite file, or None if queries are cheaper."""
        return None

    @abstractmethod
    async def close(self, *, timeout_s: float) -> None:
        """Delete the instance; succeeds if it is already gone."""

    async def is_alive(self, *, timeout_s: float) -> bool:
        """Return False if the backend knows, without reaching the instance, that it runs no more.
        Raises BackendError if that is unknown."""
        return True

    @property
    def end_reason(self) -> str | None:
        """The reason why it has ended; None while no end is known."""
        return None


@dataclass(frozen=True, slots=True)
class ProvisionRequest:
    """Request for one instance, tagged with its `episode_id`, which names run and gateway.

    `ttl_s` is for backends that can end an instance by themselves; the rest says which of the
    attempts at a task it is for."""

    episode_id: str
    task: Task
    ttl_s: float
    group_id: str = ""
    attempt_index: int = 0
    try_index: int = 0


@dataclass(frozen=True, slots=True)
class Orphan:
    """An instance that was created, or may have been (`instance_id` None), and has no owner."""

    episode_id: str
    instance_id: str | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatLateness:
    """Late heartbeats of a backend that ends instances without them: `late` of its `instances` had
    none confirmed for two thirds of their time. `why` is the error of the newest failed one."""

    late: int
    instances: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class PoolState:
    """Instances that were started ahead: `ready` of at most `size`."""

    name: str
    ready: int
    size: int


class Backend(ABC):
    """Source of instances. By default they end with the gateway, and leave no orphans."""

    # True if each instance is a separate machine or process, which can hang alone.
    isolates_instances = False

    def serves_environment(self, env_key: str) -> bool:
        """Return False if the environment certainly does not exist here, True if it may."""
        return True

    @abstractmethod
    async def provision_instance(self, request: ProvisionRequest, *, timeout_s: float) -> Instance:
        """Create an instance. Safe to repeat with the same `episode_id`."""

    async def reclaim_orphan(self, orphan: Orphan, *, timeout_s: float) -> None:
        """Delete an instance that may be known only by its tag; succeeds if there is none."""
        return None

    @property
    def lateness(self) -> HeartbeatLateness | None:
        """Late heartbeats; None if instances need none."""
        return None

    @property
    def warm_pools(self) -> Sequence[PoolState]:
        """The pools of instances that were started ahead."""
        return ()

    @property
    def refused_key(self) -> str | None:
        """A line on a key that the server refused lately, with its variable; None if it refused
        none."""
        return None

    @abstractmethod
    async def close(self) -> None:
        """Close connections and child processes."""


class EpisodeRecord:
    """Notes of what the environment of one episode answered, in order. This one keeps nothing.
    Nothing of it waits or fails."""

    def note_opened(
        self, instance: Instance, tools: Sequence[Tool], shown: Sequence[Part]
    ) -> None: ...

    def note_unopened(self, failure: str) -> None: ...

    def note_call(self, call: PolicyCall, answer: CallAnswer) -> None: ...

    def note_tools(self, tools: Sequence[Tool]) -> None:
        """Note the tools that the environment listed again."""

    def note_loss(self, why: str) -> None:
        """Note that the instance is known to have ended, before any call met it."""

    def note_grade(self, submission: Submission, grade: Grade) -> None: ...

    def note_end(self) -> None: ...


class Recorder:
    """Recorder of episodes; this one records nothing."""

    def start_episode(self, request: ProvisionRequest) -> EpisodeRecord:
        return EpisodeRecord()


QueryFn = Callable[[str, str, Sequence[SqlValue]], Awaitable[Rows]]
# Raises QueryError for a tool that a verifier may not call.
CallFn = Callable[[str, Mapping[str, Any]], Awaitable[CallResult]]
SnapshotFn = Callable[[str], Awaitable[bytes | None]]


@dataclass(frozen=True, slots=True)
class Verification:
    """A verifier, its arguments besides `env`, and its access to the final state.

    `call` makes read-only tool calls; without it there are no tools. A verifier that is not
    `trusted` may try anything to reach more; one with `packages`, which are trusted as well, may
    import what is installed. `run_id` names the run whose share of the processes it takes."""

    source: str
    function: str
    query: QueryFn
    snapshot: SnapshotFn
    arguments: Mapping[str, Any]
    call: CallFn | None = None
    trusted: bool = False
    packages: bool = False
    run_id: str = ""


class Grader(Protocol):
    async def run_verifier(self, verification: Verification, *, timeout_s: float) -> Execution:
        """Run a verifier. Raises BackendError if the environment fails to answer it."""
        ...
