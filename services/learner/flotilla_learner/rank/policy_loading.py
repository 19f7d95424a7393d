"""Loading of a policy, whole or this rank's part of it, ready for training."""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.algo.packing import Segments
from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.activation_checkpointing import enable_checkpointing
from flotilla_learner.rank.block_compilation import CompiledBlocks
from flotilla_learner.rank.canary import canary_token_ids
from flotilla_learner.rank.lora import ADAPTER, Adapters, add_adapters, freeze_model
from flotilla_learner.rank.model import DTYPES, Policy
from flotilla_learner.rank.model_loading import (
    ModelError,
    own_folder,
    read_model,
    read_split_body,
    read_split_model,
)
from flotilla_learner.rank.pictures import Vision, freeze_vision, load_vision
from flotilla_learner.rank.policy_checks import (
    check_attention,
    check_head,
    check_rope,
    packs_are_exact,
    shared_prompts_are_exact,
)
from flotilla_learner.rank.routing_replay import check_replay, prepare_routers
from flotilla_learner.rank.sharding import ShardLayout

# Names by which transformers' modules and settings keep what is drawn in training only.
_RANDOM = re.compile(r"drop|^(input_)?jitter_noise$")


def load_policy(
    config: PolicyConfig,
    rank: RankConfig,
    source: str | Path | None = None,
    lora: LoraConfig | None = None,
    *,
    frozen: bool = False,
) -> Policy:
    """Load the policy's weights, from `source` (a checkpoint folder) if given.

    With `lora` they are frozen and get adapters, which have no effect yet; `frozen` is for
    adapters that are added later. Raises ModelError if the model cannot be found, or would not
    be trained as it is served."""
    dtype = DTYPES[config.dtype]
    model = read_model(config, source)
    unchanged = _freeze_parts(model, config)
    if frozen:
        freeze_model(model, dtype)
    merged = config.adapter_rank is None
    adapters = add_adapters(model, lora, dtype, merged=merged) if lora is not None else None
    vision = _load_vision(config, rank)
    policy = prepare_policy(
        model, dtype, rank, adapters=adapters, vision=vision, unchanged=unchanged
    )
    return _compile_blocks(_follow_spec(policy, config), rank)


def load_split_policy(
    config: PolicyConfig,
    rank: RankConfig,
    layout: ShardLayout,
    source: str | Path | None = None,
    lora: LoraConfig | None = None,
    adapter_names: Sequence[str] = (ADAPTER,),
) -> Policy:
    """Load this rank's part of the policy, like `load_policy` for the whole.

    All adapters that it will have must be named now."""
    dtype, added = DTYPES[config.dtype], list[Adapters]()
    unchanged: set[str] = set()

    def prepare(model: PreTrainedModel) -> None:
        unchanged.update(_freeze_parts(model, config))
        if lora is not None:
            merged = config.adapter_rank is None
            added.append(add_adapters(model, lora, dtype, adapter_names, merged=merged))

    model = read_split_model(config, layout, source, prepare=prepare)
    adapters = added[-1] if added else None
    policy = prepare_policy(
        *(model, dtype, rank),
        layout=layout,
        adapters=adapters,
        vision=_load_vision(config, rank),
        unchanged=frozenset(unchanged),
    )
    return _compile_blocks(_follow_spec(policy, config), rank)


def load_split_body(config: PolicyConfig, rank: RankConfig, layout: ShardLayout) -> Any:
    """Load this rank's part of `policy.model` without its head, ready for training."""
    body = read_split_body(config, layout)
    switch_dropout_off(body)
    if rank.gradient_checkpointing != "auto":
        enable_checkpointing(body, rank.gradient_checkpointing)
    return body.train()


def _freeze_parts(model: PreTrainedModel, config: PolicyConfig) -> frozenset[str]:
    """Freeze what reads pictures, as configured; return the names of what is frozen."""
    return frozenset() if config.vision is None else freeze_vision(model, config.vision)


def _load_vision(config: PolicyConfig, rank: RankConfig) -> Vision | None:
    if config.vision is None:
        return None
    return load_vision(config.vision, own_folder(config), torch.device(rank.device))


def _follow_spec(policy: Policy, config: PolicyConfig) -> Policy:
    """Return the policy as the run's engines serve it."""
    policy = replace(policy, max_model_len=config.max_model_len)
    if config.routing_replay == "off":
        return policy
    segments = Segments([canary_token_ids(policy.vocabulary)])
    try:
        routing = prepare_routers(policy.model, replays=config.routing_replay == "replay")
        check_replay(routing, partial(policy.segment_states, segments), policy.device)
    except ValueError as error:
        raise ModelError(str(error)) from error
    return replace(policy, routing=routing)


def _compile_blocks(policy: Policy, rank: RankConfig) -> Policy:
    """Have the blocks compiled, if configured; the earlier checks ran them uncompiled."""
    if not rank.compile:
        return policy
    compiled = CompiledBlocks(policy.device)
    compiled.add_model(policy.model)
    return replace(policy, compiled=compiled)


def prepare_policy(
    model: PreTrainedModel,
    dtype: torch.dtype,
    rank: RankConfig,
    *,
    layout: ShardLayout | None = None,
    adapters: Adapters | None = None,
    vision: Vision | None = None,
    unchanged: frozenset[str] = frozenset(),
) -> Policy:
    """Make a loaded model trainable and check that its logprobs match its own computation.

    With a `layout` each rank keeps a part. `unchanged` are names of frozen parameters beside
    adapters' base."""
    device = torch.device(rank.device)
    if layout is None:
        nn.Module.to(model, device)
    switch_dropout_off(model)
    check_rope(model)
    check_attention(model.config)
    if rank.gradient_checkpointing != "auto":
        enable_checkpointing(model, rank.gradient_checkpointing)
    model.train()
    scale = _logit_scale(model.config)
    policy = Policy(
        model,
        model.config,
        dtype,
        device,
        packable=False,
        logit_scale=scale,
        adapters=adapters,
        vision=vision,
        unchanged=unchanged,
    )
    policy = replace(policy, offload_activations=rank.offload_activations)
    if layout is not None:
        policy = policy.split_over_ranks(layout)
    if adapters is not None:
        adapters.reset()
    check_head(policy)
    packable = packs_are_exact(policy)
    shares = rank.share_prompts and packable and shared_prompts_are_exact(policy)
    return replace(policy, packable=packable, shares_prompts=shares)


def switch_dropout_off(model: nn.Module) -> None:
    """Switch off what is random in training, such as dropout: behaviour logprobs were computed
    without it.

    With dropout, a ratio is noise."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Many modules draw by functions, with a share of their own or of their settings.
        for owner in (module, getattr(module, "config", None)):
            for name, value in list(getattr(owner, "__dict__", {}).items()):
                if isinstance(value, float) and _RANDOM.search(name):
                    setattr(owner, name, 0.0)


def _logit_scale(settings: Any) -> float:
    """Return the factor of a model's logits, as in the configs of Cohere and Granite."""
    text = settings.get_text_config()
    factor = getattr(text, "logit_scale", None)
    divisor = getattr(text, "logits_scaling", None)
    return float(1.0 if factor is None else factor) / float(1.0 if divisor is None else divisor)
