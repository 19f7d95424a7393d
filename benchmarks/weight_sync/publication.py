"""A random model published as by ranks, and CPU time of processes."""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from flotilla_common.domain.policy import PolicyId
from flotilla_environments.tiny_policy.tokenizer import save_tokenizer, train_tokenizer
from flotilla_learner.rank.weight_slots import WeightSlots
from flotilla_learner.types import Publication as Written
from flotilla_rollout.types import Publication

SIZES: dict[str, Any] = {
    "vocab_size": 32_768,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
NOTHING = np.zeros(0, np.float32)
CANARY = np.arange(5, 40, dtype=np.int32)


class PublishedModel:
    """A tied-head Qwen3 in bfloat16, in `model` for engines, and its slots in shared memory."""

    def __init__(self, folder: Path, layers: int) -> None:
        self.model_folder = folder / "model"
        model = random_model(layers).bfloat16()
        model.save_pretrained(self.model_folder)
        save_tokenizer(train_tokenizer(["user assistant"] * 3, 290), self.model_folder)
        self.parameters = dict(model.named_parameters())
        self.slots = WeightSlots(self.parameters, torch.bfloat16, folder, "weights")
        self.layers, self.total_bytes = layers, self.slots.total_bytes
        self._version = 0

    def write_next(self) -> Written:
        """Publish the current parameters under the next version."""
        self._version += 1
        return write_version(self.slots, self._version)


def random_model(layers: int) -> Qwen3ForCausalLM:
    """Return a model in float32, the same each time."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, num_hidden_layers=layers))


def write_version(slots: WeightSlots, version: int) -> Written:
    path, fingerprint, entries = slots.write_version(version)
    fields = (version, fingerprint, entries, slots.total_bytes, path)
    return Written(*fields, CANARY, NOTHING)


def announced(written: Written, transport: str, location: str) -> Publication:
    """Return a publication as announced to a worker."""
    return Publication(
        policy=policy_of(written),
        manifest=written.manifest,
        total_bytes=written.total_bytes,
        transport=transport,
        location=location,
        canary_token_ids=CANARY,
        timeout_s=120.0,
    )


def policy_of(written: Written) -> PolicyId:
    return PolicyId(1, written.version, written.fingerprint)


def cpu_of(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU seconds of processes, without those of their ended children."""
    return sum(used.user + used.system for used in (each.cpu_times() for each in processes))


class Clock:
    """Stopwatch of this process's CPU seconds and wall time."""

    def __init__(self) -> None:
        self._cpu, self._wall = time.process_time(), time.monotonic()

    @property
    def cpu_s(self) -> float:
        return time.process_time() - self._cpu

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self._wall


def median_ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    pairs = zip(ours, others, strict=True)
    return round(statistics.median(one / other for one, other in pairs), 2)


def per_gb(seconds: Sequence[float], total_bytes: int) -> float:
    return round(statistics.median(seconds) / total_bytes * 1e9, 3)
