"""Ports of a rollout worker, in its own terms: dialect, engine, environment, learner."""

from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from flotilla_common.domain.attempts import Grade, NoGradeReason
    from flotilla_common.domain.policy import PolicyId
    from flotilla_common.domain.trajectory import Trajectory
    from flotilla_common.images.picture import ShownPicture
    from flotilla_rollout.dialects.thinking import ThinkingMarks
    from flotilla_rollout.dialects.turns import PlayedTurn, Reply, Turn
    from flotilla_rollout.types import (
        Completion,
        EpisodeInfo,
        FetchedPart,
        Lease,
        MemoryPeak,
        OpenRequest,
        PromptFacts,
        Publication,
        Sampling,
        Tool,
        ToolResult,
        UpdateOutcome,
    )


class EngineError(Exception):
    """The engine could not answer one request; others may continue."""


class RequestAborted(EngineError):
    """The engine gave up this request, for example because it is being stopped."""


class EngineDead(EngineError):
    """The engine is gone, or holds torn weights: the process must be replaced."""


class WeightsTorn(EngineError):
    """New weights are half loaded: nothing is served until a publication is loaded whole."""


class EnvironmentLost(Exception):
    """The episode cannot continue: it could not be opened, or its instance or gateway is lost.
    `no_grade` is set where no further try can be graded either."""

    def __init__(self, message: str, no_grade: "NoGradeReason | None" = None) -> None:
        super().__init__(message)
        self.no_grade = no_grade


class Dialect(Protocol):
    """The prompt format and the call format of one family of models.

    Sampled token ids are never recomputed: the family's template continues after a turn, and
    nothing before it changes. Methods may be called from any thread."""

    @property
    def stop_ids(self) -> "Sequence[int]":
        """Ids that end a turn; the first is the template's own."""
        ...

    # True if the chat template itself tells the policy of its tools, False if the dialect does, in
    # a message of its own.
    template_shows_tools: bool

    @property
    def thinking(self) -> "ThinkingMarks":
        """Marks of a thinking at the start of a turn."""
        ...

    def prompt_ids(self, facts: "PromptFacts", tools: "Sequence[Tool]") -> list[int]:
        """Return the prompt of an episode, with the start of the first turn.

        Raises TemplateError."""
        ...

    def bridge_ids(
        self,
        prompt_ids: "NDArray[np.int32]",
        completion_ids: "Sequence[int]",
        replies: "Sequence[Reply]",
        tools: "Sequence[Tool]",
    ) -> list[int]:
        """Return the ids after a turn: its rest, the replies, and the start of the next turn.

        `prompt_ids` are all ids before the turn, and `completion_ids` the sampled ones. Raises
        TemplateError."""
        ...

    def parse_turn(
        self,
        prompt_ids: "NDArray[np.int32]",
        completion_ids: "Sequence[int]",
        tools: "Sequence[Tool]",
    ) -> "Turn":
        """Read a turn. Total: any sampled tokens give a turn."""
        ...

    def render_turns(
        self, facts: "PromptFacts", tools: "Sequence[Tool]", turns: "Sequence[PlayedTurn]"
    ) -> list[int]:
        """Return a conversation rendered at once: the prompt, and turns with their replies.

        If the last turn is answered, it ends with the start of the next. For rehearsals, and for
        conversations of others. Raises TemplateError."""
        ...

    def reply_text(self, reply: "Reply") -> str:
        """Return a reply as the policy reads it."""
        ...


class Engine(Protocol):
    """Engine that samples from the policy and loads new weights meanwhile."""

    @property
    def policy(self) -> "PolicyId | None":
        """Weights that answer new requests; None before the first load."""
        ...

    async def generate(
        self,
        token_ids: "NDArray[np.int32]",
        sampling: "Sampling",
        max_tokens: int,
        timeout_s: float = inf,
        pictures: "Sequence[ShownPicture]" = (),
    ) -> "Completion":
        """Sample one policy turn, up to the end-of-turn token (included) or `max_tokens`.

        `pictures` are those whose runs stand in `token_ids`, in order.

        After `timeout_s` it returns the part sampled so far. Cancelling aborts the request. Raises
        EngineError."""
        ...

    async def load_weights(self, publication: "Publication", path: Path) -> None:
        """Serve these verified weights from the next token on; requests in flight continue.

        With `publication.reload` no earlier computation is reused. An engine that has not finished
        after `publication.timeout_s` is dead.

        On EngineDead the weights are torn and nothing is served any more."""
        ...

    async def receive_weights(self, publication: "Publication") -> None:
        """Receive these weights from the learner's sender, and serve them as in `load_weights`.

        Raises TransportFailed, with the old ones still served; WeightsTorn; EngineDead."""
        ...

    async def compute_logprobs(
        self, token_ids: "NDArray[np.int32]", pictures: "Sequence[ShownPicture]" = ()
    ) -> "NDArray[np.float32]":
        """Return logprobs of tokens 1..n-1 given the tokens before them, at temperature 1."""
        ...

    async def burn_in(
        self,
        token_ids: "NDArray[np.int32]",
        max_tokens: int,
        timeout_s: float,
        pictures: "Sequence[ShownPicture]" = (),
    ) -> "Completion":
        """Sample `max_tokens` past any end of turn, without using or filling a cache.

        After `timeout_s` it returns the part sampled so far. Raises EngineError."""
        ...

    async def measure_memory(self) -> "Sequence[MemoryPeak]":
        """Return the peaks of the engine's processes so far. Raises EngineError."""
        ...

    async def identify_devices(self) -> "Sequence[str]":
        """Return a name of each device of the engine, the same in every process of this machine.

        Raises EngineError."""
        ...

    async def wait_until_dead(self) -> str:
        """Wait until the engine can no longer serve; return the reason."""
        ...

    async def close(self) -> None: ...


class Episode(Protocol):
    """One open environment instance."""

    @property
    def info(self) -> "EpisodeInfo": ...

    async def call_tool(self, name: str, arguments_json: str, timeout_s: float) -> "ToolResult":
        """Execute one tool call. Raises EnvironmentLost."""
        ...

    async def request_grade(
        self, final_answer: str | None, transcript: bytes, timeout_s: float
    ) -> "Grade":
        """Grade the final state. The transcript is empty if the verifier reads none. Raises
        EnvironmentLost."""
        ...


class Environment(Protocol):
    """Source of episodes."""

    def open_episode(self, request: "OpenRequest") -> AbstractAsyncContextManager[Episode]:
        """Open an episode that is closed on every exit. Raises EnvironmentLost on entry."""
        ...


class LeaseLost(Exception):
    """The learner no longer accepts work on this lease."""


class LearnerRefused(Exception):
    """The learner refuses this worker or its data; a retry does not help."""


class Learner(Protocol):
    """Source of leases and sink of trajectories. Calls survive a restart of the learner.

    Every method raises LearnerRefused on a permanent refusal."""

    async def lease_group(self, holding: "PolicyId", free_attempts: int) -> "Lease | None":
        """Wait some time for a lease of a group."""
        ...

    async def renew_leases(self, lease_ids: Sequence[str]) -> Collection[str]:
        """Keep leases alive; return those that are lost."""
        ...

    async def release_leases(self, lease_ids: Sequence[str]) -> None:
        """Release leases at once."""
        ...

    async def withdraw_poll(self) -> None:
        """Release a lease that a cancelled `lease_group` may still have been granted."""
        ...

    async def submit_trajectory(
        self, lease: "Lease", trajectory: "Trajectory", timeout_s: float
    ) -> bool:
        """Submit a try; return True if its group is complete. Raises LeaseLost."""
        ...


class PolicyFeed(Protocol):
    """Source of new weights: announcements and bytes."""

    def stream_publications(self, holding: "PolicyId | None") -> AsyncIterator["Publication"]:
        """Yield the weights to serve from now on, newest last; end with the connection."""
        ...

    async def report_update(
        self,
        publication: "Publication",
        outcome: "UpdateOutcome",
        canary_logprobs: "NDArray[np.float32]",
        detail: str,
        probed: "Sequence[Completion]" = (),
    ) -> bool:
        """Report the outcome of an update, with the answers to its probes.

        Return False if these weights must not be served."""
        ...

    def fetch_weights(
        self, publication: "Publication", offset: int, held: "PolicyId | None" = None
    ) -> "AsyncGenerator[FetchedPart]":
        """Yield a publication from `offset` on, some of it as differences from `held`, if given.

        Raises TransportFailed."""
        ...


class TransportFailed(Exception):
    """Weights could not be fetched; the old ones stay in use."""
