"""The learner's own words for its data: arrays and plain values, never protobuf."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from services.common.domain.attempts import StopReason
from services.common.domain.trajectory import Experts
from services.common.fingerprint import TensorEntry

# A reward of at least this is a pass.
PASS_REWARD = 1.0


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Experts of a model: its layers, experts of each, and those chosen for one token."""

    layers: int
    experts: int
    chosen: int


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One sequence as the ranks train on it. All arrays have length `len(token_ids)`.

    `behaviour_logprobs` is 0 where `policy_mask` is False; so is `temperature`'s relevance.
    """

    group_id: str
    attempt_index: int
    reward: float
    token_ids: NDArray[np.int32]
    policy_mask: NDArray[np.bool_]
    behaviour_logprobs: NDArray[np.float32]
    temperature: float
    # Trainer version minus the oldest version that wrote any of it.
    staleness: int
    stop_reason: StopReason = StopReason.DONE
    # Those that the engine chose for the first so many tokens.
    experts: Experts | None = None


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Decisions about one step, made when it was planned and journaled with its plan."""

    # Tokens whose ratio trainer / sampler lies outside [1 / x, x] get no gradient, on top of what
    # `[learner.algorithm.correction]` says.
    ratio_limit: float | None = None


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Batch that one step trains on: graded attempts of complete groups, grouped by id."""

    step: int
    sequences: tuple[TrainSequence, ...]
    settings: StepSettings = StepSettings()


@dataclass(frozen=True, slots=True)
class Histogram:
    """Distribution of values: `counts[i]` of them lie in [edges[i], edges[i + 1])."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VersionMismatch:
    """Trainer against sampler on the tokens of the sequences that one version began."""

    tokens: int
    # Means over tokens: of the k3 estimate of KL(sampler || trainer), and of |difference of
    # logprobs|; and the latter's 99.9 % quantile and maximum.
    kl: float
    abs_diff: float
    abs_diff_tail: float
    abs_diff_max: float


class Standing(IntEnum):
    """Part of a sequence in a step."""

    TRAINED = 0
    # Its group has no signal, so its gradient would be 0 and is not computed.
    NO_SIGNAL = 1
    # Masked as overlong, or without a policy token.
    LEFT_OUT = 2


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Numbers that the trainer used for every policy token of a batch.

    Each array is [policy tokens], by sequence in the batch's order."""

    standings: tuple[Standing, ...]
    advantages: tuple[NDArray[np.float32], ...]
    # Of the policy as the step began, and its entropy in nats in the first epoch; NaN where the
    # step did not compute them.
    logprobs: tuple[NDArray[np.float32], ...]
    entropy: tuple[NDArray[np.float32], ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one optimizer step; `metrics` carries the `policy/*` and `mismatch/*` names."""

    metrics: Mapping[str, float]
    seconds: float
    # True when the gradient was not finite and the parameters stayed as they were.
    skipped: bool
    histograms: Mapping[str, Histogram] = field(default_factory=dict[str, Histogram])
    # By version, for the mismatch guard.
    versions: Mapping[int, VersionMismatch] = field(default_factory=dict[int, VersionMismatch])
    # None of a step that was refused.
    tokens: StepTokens | None = field(default=None, compare=False)
    # The file in shared memory that holds `tokens` on their way out of the rank; its reader removes
    # it. None where it had no room.
    token_file: Path | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about the model that the ranks loaded."""

    parameters: int
    vocab_size: int
    # The step whose parameters are in memory: 0, or that of the checkpoint.
    step: int
    # What a publication of the first policy would be called, where that is the reference or lies
    # under adapters.
    reference: bytes | None = None
    # Of a model whose engines say which experts they choose.
    experts: ExpertShape | None = None


@dataclass(frozen=True, slots=True)
class Publication:
    """One set of weights, written and ready to be fetched."""

    version: int
    fingerprint: bytes
    manifest: tuple[TensorEntry, ...]
    total_bytes: int
    # The safetensors file in shared memory that holds it until it is superseded.
    path: Path
    canary_token_ids: NDArray[np.int32]
    # Of canary tokens 1..n-1 given those before them, at temperature 1, by the trainer.
    canary_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """Files of one checkpoint, written and fsynced by the ranks: name to SHA-256 hex."""

    directory: Path
    sha256: Mapping[str, str]


# What an engine may have set otherwise than the trainer.
Setting = Literal["temperature", "dtype", "rope", "head", "weights"]


@dataclass(frozen=True, slots=True)
class PositionBand:
    """The tokens at positions in [start, end), and how far they are off on average."""

    start: int
    end: int
    abs_diff: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Trial of one thing that the engine may have set otherwise.

    `residual` is the mean |difference| of logprobs that remains when the trainer computes that
    way too; `effect` is how far that way lies from the trainer's own, on the same tokens."""

    setting: Setting
    value: str
    residual: float
    effect: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Engine against trainer, each sequence under the weights of the version that wrote it.

    What was written by weights that the ranks no longer hold is left out.
    """

    versions: Mapping[int, VersionMismatch] = field(default_factory=dict[int, VersionMismatch])
    # Mean |difference| of each sequence of the batch; None for those left out.
    sequences: tuple[float | None, ...] = ()
    bands: tuple[PositionBand, ...] = ()
    # Only when asked for; of the sequences that the newest weights wrote.
    hypotheses: tuple[Hypothesis, ...] = ()
    # The model routes tokens to experts. Only when asked for.
    experts: bool = False
