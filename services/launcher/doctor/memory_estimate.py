"""Estimate of a run's memory and disk needs, from the model's size and the spec. Pure.

A rank's own memory is in `rank_memory`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.launcher.doctor.adapter_memory import adapter_parameters
from services.launcher.doctor.model_size import ModelSize
from services.launcher.doctor.rank_memory import (
    FLOAT32,
    MOMENTS,
    RankMemory,
    estimate_rank,
    item_bytes,
)

GIB = 2**30
# Versions of the weights in shared memory, as the learner publishes them.
_SLOTS = 3
_CPU_KV_BYTES = 256 * 2**20
# A Python process with torch, or with vLLM's engine, before it has loaded anything.
_PROCESS_BYTES = GIB


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Memory of the trainer, in bytes. `device` is per GPU and 0 on a CPU; `host` covers the
    whole service."""

    host: int
    rank: RankMemory
    device: int = 0
    # The part of `device`, or of `host` on a CPU, that is only estimated.
    estimated: int = 0
    # Of each of its machines.
    gpus: int = 0

    @property
    def certain(self) -> int:
        """Lower bound of the memory on the device, or on the host for a CPU."""
        return (self.device or self.host) - self.estimated


def estimate_trainer(
    model: ModelSize, dtype: str, max_len: int, section: Mapping[str, Any]
) -> TrainerMemory:
    """Estimate the trainer: all ranks together on the host, one rank on its device."""
    rank = estimate_rank(model, dtype, max_len, section)
    processes, work = section["rank"]["processes"], rank.activations
    # Each tensor is copied by one rank of the machine, to be written beside training.
    copied = _saved_bytes(model, section)
    if section["rank"]["device"] == "cuda":
        host = processes * (rank.offloaded + _PROCESS_BYTES) + copied
        return TrainerMemory(host, rank, rank.device, work, processes)
    host = processes * (rank.device + rank.offloaded + _PROCESS_BYTES) + copied
    return TrainerMemory(host, rank, 0, processes * work)


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory of one rollout replica on each of its machines: weights on each device, and what is
    left for the KV cache. On a CPU each worker counts as a device."""

    weights: int
    # Keys and values of one sequence of full length, on each device.
    sequence: int
    max_num_seqs: int
    # None: what `share` of the device leaves.
    cache: int | None
    share: float
    uses_gpu: bool
    engines: int
    # Of one engine, on one machine.
    workers: int
    # Of one engine.
    machines: int

    @property
    def gpus(self) -> int:
        """GPUs of one machine; 0 on a CPU."""
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
    nodes = options["nodes"]
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
        workers=parallel * int(options["options"].get("pipeline_parallel_size", 1)) // nodes,
        machines=nodes,
    )


def weight_slot_bytes(
    model: ModelSize, dtype: str, section: Mapping[str, Any], *, adapters_alone: bool
) -> int:
    """Return the bytes of the weights' slots in /dev/shm, from which every engine of the
    machine loads; of adapters where these are published alone."""
    lora = section.get("lora") if adapters_alone else None
    published = model.parameters if lora is None else adapter_parameters(model, lora)
    return _SLOTS * published * item_bytes(dtype)


def checkpoint_bytes(model: ModelSize, dtype: str, section: Mapping[str, Any]) -> int:
    """Return the bytes of the checkpoints that are kept, the one being written, and the final
    model."""
    kept = (section["checkpoint"]["keep"] + 1) * _saved_bytes(model, section)
    return kept + model.parameters * item_bytes(dtype)


def _saved_bytes(model: ModelSize, section: Mapping[str, Any]) -> int:
    models = 2 if section["algorithm"]["advantage"] == "gae" else 1
    lora = section.get("lora")
    trained = model.parameters if lora is None else adapter_parameters(model, lora)
    return models * trained * (FLOAT32 + MOMENTS)


def format_gib(size: float) -> str:
    """Format a size: `12.3 GiB`, or MiB below one tenth of a GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"
