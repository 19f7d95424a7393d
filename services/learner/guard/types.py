"""Messages between the mismatch guard and the ranks. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from services.learner.types import VersionMismatch

# What an engine may have set otherwise than the trainer.
Setting = Literal["temperature", "dtype", "rope", "head", "weights"]


@dataclass(frozen=True, slots=True)
class Probe:
    """A continuation that an engine samples before it gets work."""

    prompt_token_ids: NDArray[np.int32]
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Tokens that an engine sampled after the prompt, and the logprobs that it reports."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


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
