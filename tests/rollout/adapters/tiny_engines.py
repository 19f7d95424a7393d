"""Real vLLM on a tiny random model, for the tests of this folder."""

from pathlib import Path
from typing import Any

import numpy as np

from flotilla_common.spec.spec import PolicyConfig
from flotilla_rollout.adapters.vllm_options import ServedModel
from flotilla_rollout.adapters.vllm_start import start_engines
from flotilla_rollout.config.rollout import EngineConfig
from flotilla_rollout.ports import Engine

# The largest allowed distance of an engine's float32 logprobs from the model's.
TOLERANCE = 1e-4
PROMPT = np.arange(3, 67, dtype=np.int32)
# A token id that practically never ends a turn.
NEVER = 383


def tiny_served(folder: Path) -> ServedModel:
    shared = PolicyConfig(model=str(folder), dtype="float32", max_model_len=1024)
    return ServedModel(folder, shared, [NEVER])


def tiny_config(**options: Any) -> EngineConfig:
    return EngineConfig(device="cpu", max_num_seqs=16, **options)


async def start_tiny_engine(folder: Path, **options: Any) -> Engine:
    """Start the engine, or engines, of `EngineConfig`'s options on a model's folder."""
    return await start_engines(tiny_config(**options), tiny_served(folder))
