"""The SDK's requests in JSON, with its names and defaults. Numbers are checked as they are read."""

from typing import Annotated, Any, Literal

import msgspec

_Text = Annotated[str, msgspec.Meta(max_length=512)]
_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
# As the protobuf of forward_backward counts.
_Number = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
# The client numbers the samples of a copied handle from a billion times a random number on.
_SampleNumber = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Token = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Positive = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
_Notes = dict[str, Any]


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all requests. `type` repeats the route."""

    type: _Text = ""


class ClientConfigBody(Body, frozen=True, kw_only=True):
    sdk_version: _Text = ""


class CreateSessionBody(Body, frozen=True, kw_only=True):
    tags: list[_Text] = []
    user_metadata: _Notes | None = None
    sdk_version: _Text = ""
    project_id: _Text | None = None
    display_name: _Text | None = None


class HeartbeatBody(Body, frozen=True, kw_only=True):
    session_id: _Id


class FinishSessionBody(Body, frozen=True, kw_only=True):
    reason: _Notes | None = None
    detail: str | None = None


class LoraBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rank: _Number
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModelBody(Body, frozen=True, kw_only=True):
    session_id: _Id
    model_seq_id: _Number
    base_model: _Id
    user_metadata: _Notes | None = None
    lora_config: LoraBody | None = None
    optimizer_config: _Notes | None = None


class ModelBody(Body, frozen=True, kw_only=True):
    """Of `get_info` and `unload_model`."""

    model_id: _Id


class PlaceBody(msgspec.Struct, frozen=True):
    """The place of any order of a model."""

    model_id: _Id
    seq_id: _Number


class AdamBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    learning_rate: Annotated[float, msgspec.Meta(ge=0)] = 1e-4
    beta1: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.95
    eps: Annotated[float, msgspec.Meta(ge=0)] = 1e-12
    weight_decay: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    grad_clip_norm: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class OptimStepBody(Body, frozen=True, kw_only=True):
    model_id: _Id
    seq_id: _Number
    adam_params: AdamBody | None = None
    # Of any optimizer but Adam.
    optimizer_params: _Notes | None = None


class SaveBody(Body, frozen=True, kw_only=True):
    """Of `save_weights` and `save_weights_for_sampler`."""

    model_id: _Id
    seq_id: _Number
    path: _Text | None = None
    ttl_seconds: _Positive | None = None
    user_metadata: dict[str, str] | None = None
    # Of `save_weights` only.
    overwrite: bool = False
    # Of `save_weights_for_sampler` only.
    sampling_session_seq_id: _Number | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class LoadWeightsBody(Body, frozen=True, kw_only=True):
    """Into a model that exists, or as the first order of a new one, of a session."""

    path: _Id
    optimizer: bool = False
    model_id: _Id | None = None
    seq_id: _Number | None = None
    session_id: _Id | None = None
    model_seq_id: _Number | None = None
    base_model: _Id | None = None
    user_metadata: _Notes | None = None
    optimizer_config: _Notes | None = None
    weights_access_token: str | None = None


class SamplingSessionBody(Body, frozen=True, kw_only=True):
    session_id: _Id
    sampling_session_seq_id: _Number
    base_model: _Id | None = None
    model_path: _Id | None = None


class ChunkBody(msgspec.Struct, frozen=True):
    """Part of a prompt; fields of images and sounds are skipped, since those are refused."""

    type: str = "encoded_text"
    tokens: list[_Token] = []


class PromptBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    chunks: list[ChunkBody]


class SamplingBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_tokens: _Positive | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1000)] = 1.0
    top_k: int = -1
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0


class SampleBody(Body, frozen=True, kw_only=True):
    prompt: PromptBody
    sampling_params: SamplingBody
    num_samples: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 1
    base_model: _Id | None = None
    model_path: _Id | None = None
    sampling_session_id: _Id | None = None
    seq_id: _SampleNumber | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: _Notes | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


class FutureBody(Body, frozen=True, kw_only=True):
    request_id: _Id
    # Whether a large result may be answered by its size first.
    allow_metadata_only: bool = False


class CancelBody(Body, frozen=True, kw_only=True):
    request_id: _Id


class WeightsInfoBody(Body, frozen=True, kw_only=True):
    tinker_path: _Id


class TtlBody(Body, frozen=True, kw_only=True):
    ttl_seconds: _Positive | None = None
