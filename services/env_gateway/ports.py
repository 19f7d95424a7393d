"""What the gateway asks of environments and of verifiers, in its own words."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from services.env_gateway.episodes.task_format import Task

SqlValue = str | int | float | bytes | None


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    description: str
    input_schema_json: str
    read_only: bool = False
    idempotent: bool = False

    @property
    def repeatable(self) -> bool:
        """Whether a call that may have been executed can be sent again without harm."""
        return self.read_only or self.idempotent


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Media:
    """`data` is empty when the bytes are to be fetched by hash; `size` counts them either way."""

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
    """What a tool answered; with `is_error` the parts are what the policy is told."""

    parts: tuple[Part, ...]
    is_error: bool = False
    reward: float | None = None
    done: bool = False


@dataclass(frozen=True, slots=True)
class Rows:
    columns: tuple[str, ...]
    rows: Sequence[Sequence[SqlValue]]


class BackendError(Exception):
    """An environment could not be reached, or refused.

    `delivered` is False when the request was certainly not executed and None when that is unknown.
    `lost` means that the instance is gone for good; `invalid` that the same request can never
    succeed; `bad_arguments` that the environment refused the arguments before executing anything;
    `unreachable` that nothing answered, or a proxy in the environment's stead.
    """

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
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.delivered = delivered
        self.retry_after_s = retry_after_s
        self.lost = lost
        self.invalid = invalid
        self.bad_arguments = bad_arguments
        self.unreachable = unreachable

    @property
    def refused(self) -> bool:
        """Nothing was done, and the same may be done later: too much at once, or nobody there."""
        absent = self.unreachable and self.delivered is False
        return (self.kind == "throttled" or absent) and not (self.lost or self.invalid)


class QueryError(Exception):
    """The database refused the statement; the message is SQLite's."""


@dataclass(frozen=True, slots=True)
class Report:
    """Checks that a verifier returned with its score, where nothing that it prints can reach."""

    passed: tuple[str, ...]
    failed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Execution:
    """One run of a verifier.

    `error` says why it could not run to its end; `retryable` whether another run may differ; `ran`
    whether it was begun at all; `cut` whether it printed more than `stdout` holds.
    """

    result: Any = None
    report: Report | None = None
    stdout: str = ""
    cut: bool = False
    error: str | None = None
    timed_out: bool = False
    instance_lost: bool = False
    retryable: bool = False
    ran: bool = True


@dataclass(frozen=True, slots=True)
class Submission:
    """What there is to grade besides the final state. `conversation` is a JSON array."""

    task: Task
    final_answer: str | None
    conversation: str | None
    # Tools that a verifier may call.
    readable: frozenset[str] = frozenset()
    run_id: str = ""


class Instance(Protocol):
    """One running environment. Every method but `close` raises BackendError."""

    @property
    def instance_id(self) -> str: ...

    @property
    def env_version(self) -> str: ...

    @property
    def data_version(self) -> str: ...

    async def list_tools(self, *, timeout_s: float) -> Sequence[Tool]:
        """Show that the instance is ready, and say which tools it has."""
        ...

    async def observe(self, *, timeout_s: float) -> Sequence[Part]:
        """What the environment shows at the start, such as a first screenshot; often nothing."""
        ...

    async def call(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> CallResult: ...

    async def grade(self, submission: Submission, *, timeout_s: float) -> Execution | None:
        """Grade where the environment lives; None leaves the task's verifier to the gateway. Asked
        again with the same object when it has raised BackendError."""
        ...

    async def query(self, db: str, sql: str, args: Sequence[SqlValue], *, timeout_s: float) -> Rows:
        """Read from the "seed" or the "current" database; QueryError if SQL is at fault."""
        ...

    async def snapshot(self, db: str, *, timeout_s: float) -> bytes | None:
        """The whole database as a SQLite file, or None where it is cheaper to ask queries."""
        ...

    async def close(self, *, timeout_s: float) -> None:
        """Delete the instance; succeeds when it is gone already."""
        ...


@runtime_checkable
class Watched(Protocol):
    """An instance whose backend can tell, without reaching the instance, whether it still runs."""

    async def alive(self, *, timeout_s: float) -> bool:
        """Raises BackendError when that is not known."""
        ...


@runtime_checkable
class Mortal(Protocol):
    """An instance that knows without asking anybody when it has ended."""

    @property
    def ended(self) -> str | None:
        """Why; None while it is not known to have."""
        ...


@dataclass(frozen=True, slots=True)
class Provision:
    """One instance to create, tagged with its `episode_id`, which names run and gateway.

    `ttl_s` is for backends that can end an instance by themselves.
    """

    episode_id: str
    task: Task
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Orphan:
    """An instance that was created, or may have been (`instance_id` None), and has no owner."""

    episode_id: str
    instance_id: str | None = None


class Backend(Protocol):
    @property
    def apart(self) -> bool:
        """Whether each instance is a machine or a process of its own, which can hang by itself."""
        ...

    def serves(self, env_key: str) -> bool:
        """Whether the environment may exist here; False is certain."""
        ...

    async def provision(self, request: Provision, *, timeout_s: float) -> Instance:
        """Create an instance. Safe to repeat with the same `episode_id`."""
        ...

    async def reclaim(self, orphan: Orphan, *, timeout_s: float) -> None:
        """Delete an instance of which only the tag may be known; succeeds when there is none."""
        ...

    async def close(self) -> None:
        """Give back connections and child processes."""
        ...


@runtime_checkable
class HeartbeatBackend(Protocol):
    """A backend that ends instances of which it does not hear for a while."""

    @property
    def late(self) -> int:
        """How many instances it has not confirmed to have heard of for most of their time."""
        ...

    @property
    def beating(self) -> int:
        """How many instances it has to hear of."""
        ...

    @property
    def last_failure(self) -> str:
        """What the newest heartbeat that failed was told; empty while none has."""
        ...


QueryFn = Callable[[str, str, Sequence[SqlValue]], Awaitable[Rows]]
# Raises QueryError for a tool that a verifier may not call.
CallFn = Callable[[str, Mapping[str, Any]], Awaitable[CallResult]]
SnapshotFn = Callable[[str], Awaitable[bytes | None]]


@dataclass(frozen=True, slots=True)
class Verification:
    """A verifier, the arguments it is given besides `env`, and how it sees the final state.

    `call` makes tool calls that only read; without it there are none to make.
    One that is not `trusted` may try anything to get at more than that. `run_id` is whose share of
    the processes it takes.
    """

    source: str
    function: str
    query: QueryFn
    snapshot: SnapshotFn
    arguments: Mapping[str, str | None]
    call: CallFn | None = None
    trusted: bool = False
    run_id: str = ""


class Grader(Protocol):
    async def execute(self, verification: Verification, *, timeout_s: float) -> Execution:
        """Raises BackendError for what the environment fails to answer the verifier."""
        ...

    async def close(self) -> None: ...
