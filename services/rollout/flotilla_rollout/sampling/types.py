"""Values of the sampling service: what callers order, and what they get."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class NamedWeights:
    """Weights of a sampler: the engine's base, an adapter in PEFT's files, or a whole model."""

    # The caller's name for them, reported with each token.
    label: str
    kind: Literal["base", "adapter", "model"]
    folder: Path = Path()


@dataclass(frozen=True, slots=True)
class SamplingOrder:
    """Answers to sample to one prompt, and facts about the prompt."""

    prompt_ids: NDArray[np.int32]
    num_samples: int
    # 0: what the window leaves.
    max_tokens: int
    # 0 is greedy decoding.
    temperature: float
    top_p: float
    # -1 keeps all.
    top_k: int
    seed: int | None
    # Without any the model's own ends of a text stop it.
    stop_strings: Sequence[str]
    stop_ids: Sequence[int]
    prompt_logprobs: bool
    topk: int
    # Number of the first answer, by which seeds go: answers may be ordered in parts.
    first_answer: int = 0


@dataclass(frozen=True, slots=True)
class RequestWeights:
    """Weights that answer a request: the engine's adapter, 0 for none, and the prefix cache."""

    adapter: int
    salt: str


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """An answer as the engine gives it. `spans` are numbers of the engine's state of weights, each
    with the number of tokens that it sampled."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    stopped: bool
    spans: tuple[tuple[int, int], ...]
    cached: int


@dataclass(frozen=True, slots=True)
class PromptReport:
    """Logprobs of a prompt at temperature 1, and the `topk` likeliest tokens of each position.

    The first position has NaN, and -1 for token ids."""

    logprobs: NDArray[np.float32]
    topk_ids: NDArray[np.int32]
    topk_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class PromptAnswer:
    """A sampled answer. `spans` are labels of weights with the number of their tokens, in order."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    # False if it was cut at `max_tokens`.
    stopped: bool
    spans: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class SamplingOutcome:
    """What an order gets. The report is absent if it was not asked for."""

    answers: Sequence[PromptAnswer]
    report: PromptReport | None
    cached: int
