"""The learner's own types for its data: arrays and plain values, never protobuf."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flotilla_common.domain.attempts import StopReason
from flotilla_common.domain.trajectory import Candidates, Experts
from flotilla_common.images.picture import PlacedPicture, ShownPicture
from flotilla_common.weights.fingerprint import TensorEntry


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """Experts of a model: its MoE layers, the experts in each, and those chosen for one token."""

    layers: int
    experts: int
    chosen: int


class TurnTokens(NamedTuple):
    """Policy tokens of one turn in a sequence: the turn's number in its attempt, how many they are,
    and the environment's reward for the turn's calls, if it gave one."""

    turn: int
    tokens: int
    reward: float | None


@dataclass(frozen=True, slots=True)
class TeacherScores:
    """The teacher's logprobs at temperature 1 of one sequence's policy tokens, [n], and, if asked
    for, its likeliest tokens at each of them, likeliest first, with theirs: [n, k], else [n, 0]."""

    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TrainSequence:
    """One sequence as the ranks train on it. Arrays without another note have length
    `len(token_ids)`.

    `behaviour_logprobs` is 0, and `temperature` has no meaning, where `policy_mask` is False.
    """

    group_id: str
    attempt_index: int
    reward: float
    token_ids: NDArray[np.int32]
    policy_mask: NDArray[np.bool_]
    behaviour_logprobs: NDArray[np.float32]
    temperature: float
    # Trainer version minus the oldest version that wrote any of its tokens.
    staleness: int
    stop_reason: StopReason = StopReason.DONE
    # Chosen by the engine, for the sequence's first tokens.
    experts: Experts | None = None
    # In order.
    pictures: tuple[PlacedPicture, ...] = ()
    # The engine has scored these tokens and sampled none: with ids that it never samples, too.
    canary: bool = False
    # All its policy tokens by turn, in order; empty if no turn of its attempt was rewarded.
    turns: tuple[TurnTokens, ...] = ()
    # Further numbers that the attempt's verifier returned, by name; a missing one is unknown.
    named_rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    # What each policy token was sampled from; None: the whole vocabulary.
    candidates: Candidates | None = None
    # Of every sequence of a step that is `taught`.
    teacher: TeacherScores | None = None


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Decisions about one step, made when it was planned and journaled with its plan."""

    # Tokens whose ratio trainer / sampler lies outside [1 / x, x] get no gradient, in addition to
    # `[learner.algorithm.correction]`.
    ratio_limit: float | None = None
    # Its sequences have a teacher's scores, journaled with the plan, and are distilled from.
    taught: bool = False


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """Training batch of one step: graded attempts of complete groups, grouped by id."""

    step: int
    sequences: tuple[TrainSequence, ...]
    settings: StepSettings = StepSettings()
    # PNG or JPEG files that the sequences show, by hexadecimal SHA-256.
    pictures: Mapping[str, bytes] = field(default_factory=dict[str, bytes], repr=False)
    # The sequences are demonstrations: the loss is their negative log-likelihood, and nothing is
    # estimated from rewards or compared with a sampler.
    imitated: bool = False


@dataclass(frozen=True, slots=True)
class BatchScore:
    """Number of policy tokens of a batch, and their mean negative log-likelihood in nats."""

    tokens: int
    loss: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """Distribution of values: `counts[i]` of them lie in [edges[i], edges[i + 1])."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VersionMismatch:
    """Trainer against sampler on the tokens of all sequences that one version started."""

    tokens: int
    # Means over tokens of the k3 estimate of KL(sampler || trainer) and of |difference of
    # logprobs|; then the 99.9 % quantile and the maximum of the latter.
    kl: float
    abs_diff: float
    abs_diff_tail: float
    abs_diff_max: float


class Standing(IntEnum):
    """Role of a sequence in a step."""

    TRAINED = 0
    # Its group has no signal, so its gradient would be 0 and is not computed.
    NO_SIGNAL = 1
    # Masked as overlong, or without policy tokens.
    LEFT_OUT = 2


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Values that the trainer computed for every policy token of a batch.

    Each array is [policy tokens], one per sequence in batch order."""

    standings: tuple[Standing, ...]
    advantages: tuple[NDArray[np.float32], ...]
    # Under the policy at the start of the step; its entropy in nats in the first epoch. NaN where
    # the step did not compute them.
    logprobs: tuple[NDArray[np.float32], ...]
    entropy: tuple[NDArray[np.float32], ...]
    # Weights that corrections gave a token's loss in the first epoch, 0 where they masked it; NaN
    # where the step did not compute them.
    corrections: tuple[NDArray[np.float32], ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of one optimizer step; `metrics` carries the `policy/*` and `mismatch/*` names."""

    metrics: Mapping[str, float]
    seconds: float
    # True if the gradient was not finite and the parameters are unchanged.
    skipped: bool
    histograms: Mapping[str, Histogram] = field(default_factory=dict[str, Histogram])
    # By version, for the mismatch guard.
    versions: Mapping[int, VersionMismatch] = field(default_factory=dict[int, VersionMismatch])
    # None if the step was refused.
    tokens: StepTokens | None = field(default=None, compare=False)
    # File in shared memory that holds `tokens` on their way out of the rank; its reader removes
    # it. None if there was no room for it.
    token_file: Path | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about the model that the ranks loaded."""

    parameters: int
    vocab_size: int
    # Step of the parameters in memory: 0, or that of the checkpoint.
    step: int
    # Fingerprint that a publication of the first policy would have, if that policy is the KL
    # reference, which it is not after a warm start, or the base of adapters.
    reference: bytes | None = None
    # Set if the model's engines report the experts that they choose.
    experts: ExpertShape | None = None
    # Ids that engines never sample: those that stand for pictures.
    banned_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Publication:
    """One set of weights, written and ready to be fetched."""

    version: int
    fingerprint: bytes
    manifest: tuple[TensorEntry, ...]
    total_bytes: int
    # Safetensors file in shared memory; it exists until the publication is superseded.
    path: Path
    canary_token_ids: NDArray[np.int32]
    # Trainer's logprobs of canary tokens 1..n-1 given their prefixes, at temperature 1.
    canary_logprobs: NDArray[np.float32]
    # Shown among the tokens.
    canary_pictures: tuple[ShownPicture, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """Files of one checkpoint, written and fsynced by the ranks: name to SHA-256 hex."""

    directory: Path
    sha256: Mapping[str, str]


# Settings in which an engine may differ from the trainer.
Setting = Literal["temperature", "dtype", "rope", "head", "weights"]


@dataclass(frozen=True, slots=True)
class PositionBand:
    """Tokens at positions in [start, end) and their mean error."""

    start: int
    end: int
    abs_diff: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Test of one setting in which the engine may differ.

    `residual` is the mean |difference| of logprobs that remains when the trainer adopts that
    setting; `effect` is how far it moves the trainer's own logprobs on the same tokens."""

    setting: Setting
    value: str
    residual: float
    effect: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Engine against trainer, each sequence under the weights of the version that wrote it.

    Sequences written by weights that the ranks no longer hold are left out.
    """

    versions: Mapping[int, VersionMismatch] = field(default_factory=dict[int, VersionMismatch])
    # Mean |difference| of each sequence of the batch; None if left out.
    sequences: tuple[float | None, ...] = ()
    bands: tuple[PositionBand, ...] = ()
    # Only with `diagnose`; covers the sequences that the newest weights wrote.
    hypotheses: tuple[Hypothesis, ...] = ()
    # True if the model routes tokens to experts. Only with `diagnose`.
    experts: bool = False
