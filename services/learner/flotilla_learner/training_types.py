"""Values of training at a caller's request, as shared by the service and the ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """What of a model is trained: all weights at rank 0, else adapters of the chosen layers."""

    rank: int
    # Of the adapters' initial values.
    seed: int = 0
    attention: bool = True
    mlp: bool = True


@dataclass(frozen=True, slots=True)
class TargetSequence:
    """A sequence, and targets that the caller names for its positions: nothing is shifted."""

    token_ids: NDArray[np.int32]
    # [n], or [n, k] with several targets at each position.
    target_ids: NDArray[np.int64]
    # Of the targets' shape, by the loss's names.
    inputs: Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class TargetBatch:
    """Sequences whose losses are summed."""

    loss: str
    # Complete: with the loss's defaults.
    options: Mapping[str, float]
    sequences: Sequence[TargetSequence]
    # Compute logprobs and loss, and no gradient.
    forward_only: bool = False


@dataclass(frozen=True, slots=True)
class TargetScores:
    """Result of a pass over a batch."""

    # Per sequence, of its targets' shape.
    logprobs: Sequence[NDArray[np.float32]]
    # By `NAME:REDUCTION`; a reduction is `sum`, `mean`, `min` or `max`.
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class AdamUpdate:
    """Settings of one update by AdamW."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    # 0 does not clip.
    grad_clip_norm: float


@dataclass(frozen=True, slots=True)
class BaseModel:
    """Facts about the base."""

    parameters: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class WrittenFolder:
    """A folder of weights or state that was written."""

    path: Path
    total_bytes: int
    # SHA-256 over the weights; of exports only.
    fingerprint: bytes = b""
