"""Estimate of one training rank's memory, by what it holds. Pure.

A rank keeps parameters in float32 whatever the compute dtype: 4 bytes per parameter, as many for
its gradient, 8 for AdamW's moments. Under adapters it keeps them as engines do, and these alone
have gradients and moments. Activation memory is an estimate, and reported as such."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.models.activation_memory import (
    Checkpointing,
    DecoderShape,
    block_input_bytes,
    layer_activation_bytes,
)
from services.launcher.doctor.adapter_memory import adapter_parameters, merging_bytes
from services.launcher.doctor.model_size import ModelSize

FLOAT32, GRADIENT, MOMENTS = 4, 4, 8


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of one rank, in bytes: on its device, or for a CPU all on the host, and `offloaded`
    in host memory."""

    parameters: int
    gradients: int
    moments: int
    reference: int
    # Of the longest pack, with the logits of a chunk of the head.
    activations: int
    offloaded: int

    @property
    def device(self) -> int:
        """Return all but what is offloaded."""
        held = self.parameters + self.gradients + self.moments
        return held + self.reference + self.activations


def item_bytes(dtype: str) -> int:
    return FLOAT32 if dtype == "float32" else 2


def estimate_rank(
    model: ModelSize, dtype: str, max_len: int, section: Mapping[str, Any]
) -> RankMemory:
    """Estimate a rank under `[learner]`, for sequences of up to `max_len` tokens."""
    if section.get("lora") is not None:
        return _estimate_adapted_rank(model, dtype, max_len, section)
    rank, algorithm = section["rank"], section["algorithm"]
    models = 2 if algorithm["advantage"] == "gae" else 1
    split = rank["processes"] if rank["shard"] else 1
    part, away = model.parameters // split, rank["offload_optimizer"]
    # Offloaded, AdamW's own copies of parameters and gradients come on top of its moments: 15.6
    # bytes a parameter were measured on a 4B model. Of what is split nothing else exists.
    offloaded = models * part * (MOMENTS + FLOAT32 + GRADIENT) if away else 0
    held = 0 if away and split > 1 else part
    whole = _whole_parameters(model) if split > 1 else 0
    # Without a KL term no reference policy is loaded.
    kl = algorithm["kl"]
    reference = part * FLOAT32 if kl["coefficient"] > 0 and kl["to"] == "reference" else 0
    if rank["offload_reference"]:
        offloaded, reference = offloaded + reference, 0
    offloaded += offloaded_activation_bytes(model, dtype, max_len, rank)
    return RankMemory(
        parameters=models * (held * FLOAT32 + whole * item_bytes(dtype)),
        # The whole ones are summed in float32.
        gradients=models * (held + whole) * GRADIENT,
        moments=0 if away else models * part * MOMENTS,
        reference=reference,
        activations=activation_bytes(model, dtype, max_len, rank),
        offloaded=offloaded,
    )


def _estimate_adapted_rank(
    model: ModelSize, dtype: str, max_len: int, section: Mapping[str, Any]
) -> RankMemory:
    """Estimate a rank that trains adapters. Its reference is the base, and takes nothing."""
    rank = section["rank"]
    models = 2 if section["algorithm"]["advantage"] == "gae" else 1
    split = rank["processes"] if rank["shard"] else 1
    # Embeddings stay in float32.
    embedding = model.vocab * model.hidden * (FLOAT32 - item_bytes(dtype))
    base = (model.parameters * item_bytes(dtype) + embedding) // split
    own = models * adapter_parameters(model, section["lora"]) // split
    away = rank["offload_optimizer"]
    whole = _whole_parameters(model) * item_bytes(dtype) if split > 1 else 0
    offloaded = own * (MOMENTS + FLOAT32 + GRADIENT) if away else 0
    # What is split is in host memory with the adapters.
    far = base if away and split > 1 else 0
    held = 0 if far else own
    return RankMemory(
        parameters=base - far + held * FLOAT32 + whole,
        gradients=held * GRADIENT,
        moments=0 if away else own * MOMENTS,
        reference=0,
        activations=activation_bytes(model, dtype, max_len, rank) + merging_bytes(model),
        offloaded=offloaded + far,
    )


def _whole_parameters(model: ModelSize) -> int:
    """Return the parameters that are whole at once in a pass of a rank that holds a part."""
    ends = 2 * model.vocab * model.hidden
    block = max(model.parameters - ends, 0) // model.layers
    # Embedding and head are whole during a pass, and two blocks: one is computed, one is fetched.
    return ends + 2 * block


def activation_bytes(model: ModelSize, dtype: str, max_len: int, rank: Mapping[str, Any]) -> int:
    """Estimate the longest forward and backward pass, with the logits of one chunk of the head."""
    width = item_bytes(dtype)
    tokens = max(rank["pack_tokens"], max_len)
    shape = DecoderShape(model.layers, model.hidden, model.intermediate)
    # On a GPU `auto` takes what fits, and `full` at the least.
    least: Checkpointing = "full" if rank["device"] == "cuda" else "off"
    chosen = rank["gradient_checkpointing"]
    checkpointing: Checkpointing = least if chosen == "auto" else chosen
    layers = layer_activation_bytes(shape, tokens, width, checkpointing)
    away = offloaded_activation_bytes(model, dtype, max_len, rank)
    return layers - away + head_bytes(model, rank)


def offloaded_activation_bytes(
    model: ModelSize, dtype: str, max_len: int, rank: Mapping[str, Any]
) -> int:
    """Return the bytes of the blocks' inputs that wait in host memory; none of a CPU's."""
    if rank["device"] == "cpu" or not rank["offload_activations"]:
        return 0
    shape = DecoderShape(model.layers, model.hidden, model.intermediate)
    return block_input_bytes(shape, max(rank["pack_tokens"], max_len), item_bytes(dtype))


def head_bytes(model: ModelSize, rank: Mapping[str, Any]) -> int:
    """Return the bytes of one chunk's logits, their softmax and its gradient, in float32."""
    return 3 * FLOAT32 * rank["head_chunk"] * model.vocab
