"""Estimate of a run's memory and disk needs, from the model's size and the spec. Pure.

The trainer keeps parameters in float32 whatever the compute dtype: 4 bytes per parameter, as
many for its gradient, 8 for AdamW's moments. Activation memory is an estimate, and reported
as such."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.launcher.doctor.model_size import ModelSize

GIB = 2**30
_FLOAT32 = 4
_GRADIENT, _MOMENTS = 4, 8
# Versions of the weights in shared memory, as the learner publishes them.
_SLOTS = 3
_CPU_KV_BYTES = 256 * 2**20
# A Python process with torch, or with vLLM's engine, before it has loaded anything.
_PROCESS_BYTES = GIB
# Tensors of one decoder layer that the backward pass needs, in widths of the hidden state.
_LAYER_WIDTHS = 16


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Memory of the trainer, in bytes. `device` is per GPU and 0 on a CPU; `host` covers the
    whole service."""

    host: int
    device: int = 0
    # The part of `device`, or of `host` on a CPU, that is only estimated.
    estimated: int = 0
    # Of each of its machines.
    gpus: int = 0

    @property
    def certain(self) -> int:
        """Lower bound of the memory on the device, or on the host for a CPU."""
        return (self.device or self.host) - self.estimated


def item_bytes(dtype: str) -> int:
    return _FLOAT32 if dtype == "float32" else 2


def estimate_trainer(
    model: ModelSize, dtype: str, max_len: int, section: Mapping[str, Any]
) -> TrainerMemory:
    """Estimate the trainer: all ranks together on the host, one rank on its device."""
    rank, algorithm = section["rank"], section["algorithm"]
    cuda, count = rank["device"] == "cuda", model.parameters
    models = 2 if algorithm["advantage"] == "gae" else 1
    state = count * (_FLOAT32 + _GRADIENT)
    optimizer = count * _MOMENTS
    # Offloaded, AdamW's own copies of parameters and gradients come on top of its moments: 15.6
    # bytes a parameter were measured on a 4B model.
    aside = count * (_MOMENTS + _FLOAT32 + _GRADIENT) if rank["offload_optimizer"] else 0
    near = models * (state + (0 if aside else optimizer))
    split = rank["processes"] if rank["shard"] else 1
    if split > 1:
        near = models * split_state_bytes(model, split)
    far = models * aside
    # Without a KL term no reference policy is loaded.
    reference = count * _FLOAT32 // split if algorithm["kl"]["coefficient"] > 0 else 0
    if cuda and (split > 1 or not rank["offload_reference"]):
        near += reference
    else:
        far += reference
    work = activation_bytes(model, dtype, max_len, rank)
    processes = rank["processes"]
    if cuda:
        return TrainerMemory(processes * (far + _PROCESS_BYTES), near + work, work, processes)
    return TrainerMemory(processes * (near + far + work + _PROCESS_BYTES), 0, processes * work)


def split_state_bytes(model: ModelSize, ranks: int) -> int:
    """Return the bytes of a rank that holds one of so many parts, and what is whole in a pass."""
    ends = 2 * model.vocab * model.hidden
    block = max(model.parameters - ends, 0) // model.layers
    # Embedding and head are whole during a pass, and two blocks: one is computed, one is fetched.
    whole = (ends + 2 * block) * (_FLOAT32 + _GRADIENT)
    part = model.parameters * (_FLOAT32 + _GRADIENT + _MOMENTS) // ranks
    return part + whole


def activation_bytes(model: ModelSize, dtype: str, max_len: int, rank: Mapping[str, Any]) -> int:
    """Estimate the longest forward and backward pass, with the logits of one chunk of the head."""
    width = item_bytes(dtype)
    tokens = max(rank["pack_tokens"], max_len)
    layer = tokens * width * (_LAYER_WIDTHS * model.hidden + 3 * model.intermediate)
    if rank["gradient_checkpointing"]:
        layers = model.layers * tokens * model.hidden * width + layer
    else:
        layers = model.layers * layer
    return layers + head_bytes(model, rank)


def head_bytes(model: ModelSize, rank: Mapping[str, Any]) -> int:
    """Return the bytes of one chunk's logits, their softmax and its gradient, in float32."""
    return 3 * _FLOAT32 * rank["head_chunk"] * model.vocab


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory of one rollout replica: weights on each of its devices, and what is left for the
    KV cache. On a CPU each worker counts as a device."""

    weights: int
    # Keys and values of one sequence of full length, on each device.
    sequence: int
    max_num_seqs: int
    # None: what `share` of the device leaves.
    cache: int | None
    share: float
    uses_gpu: bool
    engines: int
    # Of one engine.
    workers: int

    @property
    def gpus(self) -> int:
        """0 on a CPU."""
        return self.engines * self.workers if self.uses_gpu else 0

    def kv_cache_bytes(self, device_bytes: int) -> int:
        """Return the bytes left for the KV cache; negative if the weights alone are too large."""
        if self.cache is not None:
            return min(self.cache, device_bytes - self.weights)
        return int(self.share * device_bytes) - self.weights

    @property
    def host(self) -> int:
        """Bytes of the machine's own memory."""
        held = self.workers * (self.weights + (self.cache or 0))
        own = self.weights if self.uses_gpu else self.engines * held
        return own + self.engines * _PROCESS_BYTES


def estimate_engine(
    model: ModelSize, dtype: str, max_len: int, section: Mapping[str, Any]
) -> EngineMemory:
    options = section["engine"]
    gpu, parallel = options["device"] == "cuda", options["tensor_parallel"]
    width = item_bytes(dtype)
    cache = options["kv_cache_memory_bytes"]
    split = min(parallel, model.kv_heads)
    tokens = min(max_len, section["max_input_length"] + section["max_generate_length"])
    if section.get("limits", {}).get("on_cut") == "continue":
        tokens = max_len
    return EngineMemory(
        weights=model.parameters * width // parallel,
        sequence=model.kv_bytes(width) * tokens // split,
        max_num_seqs=options["max_num_seqs"],
        cache=cache if cache is not None or gpu else _CPU_KV_BYTES,
        share=options["gpu_memory_utilization"],
        uses_gpu=gpu,
        engines=options["data_parallel"],
        workers=parallel * int(options["options"].get("pipeline_parallel_size", 1)),
    )


def weight_slot_bytes(model: ModelSize, dtype: str) -> int:
    """Return the bytes of the weights' slots in /dev/shm, from which every engine of the
    machine loads."""
    return _SLOTS * model.parameters * item_bytes(dtype)


def checkpoint_bytes(model: ModelSize, dtype: str, section: Mapping[str, Any]) -> int:
    """Return the bytes of the checkpoints that are kept, the one being written, and the final
    model."""
    models = 2 if section["algorithm"]["advantage"] == "gae" else 1
    one = models * model.parameters * (_FLOAT32 + _MOMENTS)
    return (section["checkpoint"]["keep"] + 1) * one + model.parameters * item_bytes(dtype)


def format_gib(size: float) -> str:
    """Format a size: `12.3 GiB`, or MiB below one tenth of a GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
