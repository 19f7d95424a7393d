"""The rollout's own data types: arrays and plain values, never protobuf."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_common.domain.attempts import AttemptKey, Purpose, ToolOutcome
from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.task_text import write_task
from flotilla_common.domain.trajectory import Candidates, Experts
from flotilla_common.images.picture import Picture, ShownPicture
from flotilla_common.weights.fingerprint import TensorEntry


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """Facts that the environment states; `current_date` is its own clock, or empty."""

    prompt: str
    current_date: str
    variables: Mapping[str, str]
    shown: tuple[str, ...] = ()
    # Of the first observation, in order; the user's turn shows them after its text.
    pictures: tuple[Picture, ...] = ()
    # The system message of a conversation, which environments do not have.
    system: str = ""

    @property
    def task(self) -> str:
        """The user's text, which every dialect shows: the facts, the prompt, the observation."""
        return write_task(self.prompt, self.current_date, self.variables, self.shown)


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool offered by the environment; `parameters` is a JSON schema of an object.

    Consecutive calls of `parallel` tools may run concurrently."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    read_only: bool = False
    parallel: bool = False


class UpdateOutcome(StrEnum):
    """Outcome of a weight update. Only `ENGINE_FAILED` means that the old weights are gone."""

    APPLIED = "applied"
    FINGERPRINT_MISMATCH = "fingerprint_mismatch"
    TRANSPORT_FAILED = "transport_failed"
    ENGINE_FAILED = "engine_failed"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. Temperature 0 is greedy; `top_k` 0 is off, and otherwise asks for each
    token's candidates too."""

    temperature: float
    seed: int = 0
    top_p: float = 1.0
    top_k: int = 0
    # Return the engine's experts from this token on, if it reports them.
    experts_from: int = 0


@dataclass(frozen=True, slots=True)
class PolicySpan:
    """A run of tokens and the weights that wrote it; None for tokens inserted into the turn, which
    were not sampled."""

    policy: PolicyId | None
    length: int


@dataclass(frozen=True, slots=True)
class Completion:
    """One policy turn. `logprobs` are at the sampling temperature, one per sampled token.

    `spans` are in order and their lengths sum to the number of tokens; there are several if weights
    changed during the sampling. `cut` is True if it ran into the token limit, `timed_out` if time
    ran out first; it may then have no tokens. For `waited_s` seconds of it the engine's service
    answered nobody.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    spans: tuple[PolicySpan, ...]
    cut: bool
    timed_out: bool = False
    # Covers all tokens from `Sampling.experts_from` on except the last.
    experts: Experts | None = None
    waited_s: float = 0.0
    # With `top_k`: what each token was sampled from, over which its logprob is normalised, and the
    # number of tokens that the engine had not named themselves.
    candidates: Candidates | None = None
    mended: int = 0


def join_completions(pieces: Sequence[Completion]) -> Completion:
    """Join the pieces of one turn sampled in several requests; it ends like the last one."""
    if len(pieces) == 1:
        return pieces[0]
    return Completion(
        np.concatenate([piece.token_ids for piece in pieces]),
        np.concatenate([piece.logprobs for piece in pieces]),
        tuple(span for piece in pieces for span in piece.spans),
        pieces[-1].cut,
        pieces[-1].timed_out,
    )


# A turn for which the policy had no time.
OUT_OF_TIME = Completion(
    np.zeros(0, np.int32), np.zeros(0, np.float32), (), cut=False, timed_out=True
)


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """Peak memory of one process of an engine, in bytes; if it computes on a device, also the
    device's peak and size."""

    host: int
    device: int = 0
    device_total: int = 0


@dataclass(frozen=True, slots=True)
class Probe:
    """A continuation that the learner requests to judge the engine."""

    token_ids: NDArray[np.int32]
    max_tokens: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Publication:
    """New weights as announced; `location` is a path, or host:port of the weight service."""

    policy: PolicyId
    manifest: tuple[TensorEntry, ...]
    total_bytes: int
    transport: str
    location: str
    canary_token_ids: NDArray[np.int32]
    timeout_s: float
    reload: bool = False
    # The next one may be fetched as a difference from this one.
    keep: bool = False
    probes: tuple[Probe, ...] = ()
    # Shown among the canary's tokens.
    canary_pictures: tuple[ShownPicture, ...] = ()


@dataclass(frozen=True, slots=True)
class FetchedPart:
    """A part of a publication, in order: its bytes, or a difference from the held publication."""

    data: bytes
    # Bytes of the publication that a difference covers; 0 if `data` is the bytes themselves.
    delta_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LeasedAttempt:
    """An attempt requested by a lease."""

    attempt_index: int
    next_try: int
    seed: int


@dataclass(frozen=True, slots=True)
class Lease:
    """Permission to sample one group. Durations are remaining ones, in seconds."""

    lease_id: str
    group_id: str
    task_json: str
    attempts: tuple[LeasedAttempt, ...]
    purpose: Purpose
    temperature: float
    top_p: float
    top_k: int
    min_policy: PolicyId | None
    exact_policy: PolicyId | None
    group_deadline_s: float
    lease_ttl_s: float
    max_tries: int


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """Parameters of an episode to open; `budget_s` covers everything, grading included."""

    key: AttemptKey
    task_json: str
    opening: int
    budget_s: float


@dataclass(frozen=True, slots=True)
class EpisodeInfo:
    """Description of an open episode from the gateway."""

    episode_id: str
    tools: tuple[Tool, ...]
    facts: PromptFacts
    instance_id: str = ""
    env_version: str = ""
    data_version: str = ""
    deadline_s: float = float("inf")
    # Limit of the transcript for the verifier; 0 if it reads none.
    transcript_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A tool's answer: its parts, whether the environment ended the episode, and its reward for
    this step, if any."""

    outcome: ToolOutcome
    parts: tuple[str | Picture, ...]
    done: bool = False
    reward: float | None = None

    @property
    def text(self) -> str:
        return " ".join(part for part in self.parts if isinstance(part, str))
