"""Orders to models in JSON: create, update, save and load."""

from collections.abc import Mapping
from typing import Any

import msgspec

from flotilla_tinker.types import AdamSettings, LoadOrder, ModelSettings, SaveOrder
from flotilla_tinker.wire.bodies import (
    CreateModelBody,
    LoadWeightsBody,
    OptimStepBody,
    PlaceBody,
    SaveBody,
)
from flotilla_tinker.wire.checkpoint_paths import TRAINING, check_name, read_path
from flotilla_tinker.wire.json_bodies import read_json
from flotilla_tinker.wire.wire_error import WireError

ADAM = "adamw"
_SEEDS = 2**63 - 1


def read_create_model(body: bytes) -> ModelSettings:
    """Read a body of create_model. Without a LoRA configuration, and of rank 0, all weights are
    trained. Raises WireError."""
    given = read_json(body, CreateModelBody)
    _check_optimizer(given.optimizer_config)
    lora = given.lora_config
    if lora is not None and not (lora.train_attn or lora.train_mlp):
        raise WireError("lora_config: train_attn or train_mlp must be true; no others are adapted")
    return ModelSettings(
        base_model=given.base_model,
        lora_rank=lora.rank if lora else 0,
        seed=(lora.seed or 0) % _SEEDS if lora else 0,
        train_attention=lora.train_attn if lora else True,
        train_mlp=lora.train_mlp if lora else True,
        user_metadata=given.user_metadata or {},
    )


def _check_optimizer(config: Mapping[str, Any] | None) -> None:
    kind = (config or {}).get("type", ADAM)
    if kind != ADAM:
        raise WireError(f"optimizer_config: the optimizer {kind!r} is not offered, only {ADAM}")


def read_optim_step(body: bytes) -> AdamSettings:
    """Read a body of optim_step. Raises WireError."""
    given = read_json(body, OptimStepBody)
    adam = given.adam_params
    if given.optimizer_params or adam is None:
        raise WireError("optim_step needs adam_params: no other optimizer is offered")
    return AdamSettings(
        learning_rate=adam.learning_rate,
        beta1=adam.beta1,
        beta2=adam.beta2,
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        grad_clip_norm=adam.grad_clip_norm,
    )


def read_save(body: bytes) -> SaveOrder:
    """Read a body of save_weights or save_weights_for_sampler. Raises WireError."""
    given = read_json(body, SaveBody)
    if given.path is not None and given.sampling_session_seq_id is not None:
        raise WireError("send either path, for a named sampler, or sampling_session_seq_id")
    if given.kind == "inflight" and given.sampling_session_seq_id is None:
        raise WireError("kind inflight needs sampling_session_seq_id")
    return SaveOrder(
        path_name=None if given.path is None else check_name(given.path),
        sampling_session_seq_id=given.sampling_session_seq_id,
        ttl_s=given.ttl_seconds,
        kind=given.kind,
        overwrite=given.overwrite,
        user_metadata=given.user_metadata or {},
    )


def read_load(body: bytes) -> LoadOrder:
    """Read a body of load_weights. Raises WireError."""
    given = read_json(body, LoadWeightsBody)
    if given.weights_access_token:
        raise WireError("weights_access_token: only checkpoints of this server are loaded")
    _check_optimizer(given.optimizer_config)
    if (kind := read_path(given.path).kind) != TRAINING:
        raise WireError(
            f"path: {kind} can only be sampled with; load a path of save_weights, which is"
            f" tinker://MODEL/{TRAINING}/NAME"
        )
    return LoadOrder(given.path, given.optimizer, given.user_metadata or {})


def read_place(body: bytes) -> tuple[str, int] | None:
    """Return the model and number of an order in JSON, whatever else is wrong with it; None if it
    has none."""
    try:
        found = msgspec.json.decode(body, type=PlaceBody)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found.model_id, found.seq_id
