"""Values of the front door: what clients order, and what they get."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray


class Kind(StrEnum):
    """What a future stands for; the name of the result's `type` on the wire."""

    CREATE_MODEL = "create_model"
    UNLOAD_MODEL = "unload_model"
    FORWARD_BACKWARD = "forward_backward"
    FORWARD = "forward"
    OPTIM_STEP = "optim_step"
    SAVE_WEIGHTS = "save_weights"
    LOAD_WEIGHTS = "load_weights"
    SAVE_WEIGHTS_FOR_SAMPLER = "save_weights_for_sampler"
    SAMPLE = "sample"


class Category(StrEnum):
    """Whose fault a failure is; the client's SDK retries by it."""

    UNKNOWN = "unknown"
    SERVER = "server"
    USER = "user"


@dataclass(frozen=True, slots=True)
class ClientOrder:
    """A request that is answered by a future, as it is journaled.

    `body` is the wire's own, decompressed: it is read again when the order is carried out, which
    may be after a restart."""

    kind: Kind
    # Name of the key that pays for it, never the key.
    tenant: str
    session_id: str
    # None for samples.
    model_id: str | None
    # The client's number of the order within its model, or its sampling session. Of a model's
    # orders 0 creates it: CREATE_MODEL, or LOAD_WEIGHTS from a checkpoint of another model.
    # UNLOAD_MODEL has none of its own: its number is ignored.
    seq_id: int
    body: bytes
    # Facts that the wire's answer needs besides the result, such as `sample_sequence_ids`.
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Accepted:
    """A journaled order. A repeated one, equal in kind, place and body, gets the first's."""

    request_id: str
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """Outcome of a future as it is delivered."""

    body: bytes
    # `application/json` or `application/x-protobuf`.
    content_type: str
    # Headers that only this server sends: the policy versions of sampled tokens.
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a future has no result."""

    message: str
    category: Category


@dataclass(frozen=True, slots=True)
class Pending:
    """A future that is not done: `active`, `paused_capacity` or `paused_rate_limit`."""

    queue_state: str


@dataclass(frozen=True, slots=True)
class LossSequence:
    """One sequence of a batch: inputs and pre-shifted targets of the same length n."""

    token_ids: NDArray[np.int32]
    # [n], or [n, k] for `cross_entropy`.
    target_ids: NDArray[np.int64]
    # float32 of the target's shape, by the wire's names: weights, logprobs, advantages, ...
    inputs: Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class LossBatch:
    loss: str
    options: Mapping[str, float]
    sequences: Sequence[LossSequence]
    forward_only: bool = False


@dataclass(frozen=True, slots=True)
class LossResult:
    # Per sequence, float32 of the target's shape.
    logprobs: Sequence[NDArray[np.float32]]
    # By `NAME:REDUCTION`.
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class AdamSettings:
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    # 0 does not clip.
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Settings of a trained model."""

    base_model: str
    # 0 trains all weights.
    lora_rank: int
    seed: int = 0
    train_attention: bool = True
    train_mlp: bool = True
    # The client's own notes, returned with the model.
    user_metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Save of a model, for training or for samplers."""

    # The checkpoint's name; None leaves it to the server.
    path_name: str | None
    # Opens the sampler of this number with the saved weights, which then need no name.
    sampling_session_seq_id: int | None = None
    # None keeps it for good.
    ttl_s: float | None = None
    # "inflight" replaces the weights of the model's earlier inflight samplers too.
    kind: Literal["snapshot", "inflight"] = "snapshot"
    # Of a checkpoint of the same name.
    overwrite: bool = False
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Load of a saved state. As a model's first order, number 0, it creates the model with the
    settings of the saved one."""

    path: str
    with_optimizer: bool
    user_metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class BaseFacts:
    """What is trained and sampled here."""

    model: str
    max_model_len: int
    vocabulary: int
    max_rank: int
    max_models: int
    losses: Sequence[str]
    # Models that the trainer holds, with the number of their newest operation.
    models: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What samples here."""

    model: str
    max_model_len: int
    vocabulary: int
    max_rank: int
    max_num_seqs: int
    samplers: Sequence[str]
    max_samplers: int


@dataclass(frozen=True, slots=True)
class SamplerWeights:
    """Weights of a sampler: the base if there is no folder."""

    # Names them in the answers' spans.
    label: str
    folder: str | None = None
    # A folder of a whole model, not of adapters.
    whole: bool = False


@dataclass(frozen=True, slots=True)
class SampleOrder:
    prompt_ids: NDArray[np.int32]
    num_samples: int
    # 0: what the window leaves.
    max_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop_strings: Sequence[str] = ()
    stop_ids: Sequence[int] = ()
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    # Tokens at the prompt's end whose logprobs are returned; None returns all.
    prompt_logprobs_last_n: int | None = None


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    stopped: bool
    # (label of the weights, number of tokens), in order.
    spans: Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class SampleResult:
    answers: Sequence[SampledAnswer]
    # float32 [prompt], the first NaN.
    prompt_logprobs: NDArray[np.float32] | None = None
    # [prompt, k], -1 and NaN where there is none.
    topk_ids: NDArray[np.int32] | None = None
    topk_logprobs: NDArray[np.float32] | None = None
    cache_hit_tokens: int = 0


# Times of the records are seconds since the epoch.


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """A model that a client created."""

    model_id: str
    session_id: str
    tenant: str
    settings: ModelSettings
    created_s: float
    # Number of the newest order that was carried out.
    last_seq: int
    # Updates of its weights so far, which name them in samples: `MODEL@UPDATES`.
    updates: int
    ended_s: float | None = None


@dataclass(frozen=True, slots=True)
class SamplerRecord:
    """A sampling session."""

    sampler_id: str
    session_id: str
    tenant: str
    base_model: str
    # None for the base.
    model_path: str | None


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A saved model."""

    # `tinker://MODEL/weights/NAME`, or of a sampler `tinker://MODEL/sampler_weights/NAME`
    path: str
    model_id: str
    tenant: str
    # `training` or `sampler`
    kind: str
    created_s: float
    size_bytes: int
    settings: ModelSettings
    # None: when it is deleted.
    expires_s: float | None = None
    public: bool = False
