"""Arguments of vLLM that `rollout.engine.options` must not set, each with the reason.

All others pass through by name. vLLM itself defines the valid names and values:
services/rollout/flotilla_rollout/adapters/vllm_arguments.py checks against it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flotilla_common.spec.number_ranges import MOST_CANDIDATES

_ENGINE = "rollout.engine."
# Set by keys that other parts of a run read too.
OWN_KEYS: Mapping[str, str] = {
    "model": "policy.model",
    "model_weights": "policy.model",
    "revision": "policy.revision",
    "dtype": "policy.dtype",
    "max_model_len": "policy.max_model_len",
    "trust_remote_code": "policy.trust_remote_code",
    "hf_overrides": "policy.rope_scaling",
    "tensor_parallel_size": f"{_ENGINE}tensor_parallel",
    "data_parallel_size": f"{_ENGINE}data_parallel",
    "max_num_seqs": f"{_ENGINE}max_num_seqs",
    "max_num_active_seqs": f"{_ENGINE}max_num_seqs",
    "max_num_batched_tokens": f"{_ENGINE}max_num_batched_tokens",
    "kv_cache_memory_bytes": f"{_ENGINE}kv_cache_memory_bytes",
    "gpu_memory_utilization": f"{_ENGINE}gpu_memory_utilization",
    "block_size": f"{_ENGINE}block_size",
    "enforce_eager": f"{_ENGINE}enforce_eager",
    "seed": f"{_ENGINE}seeded",
    "device_ids": "launcher.rollout.gpus",
    "enable_return_routed_experts": "policy.routing_replay",
    "aux_output_config": "policy.routing_replay",
    "enable_lora": "policy.adapter_rank",
    "max_lora_rank": "policy.adapter_rank",
    "language_model_only": "policy.vision",
    "limit_mm_per_prompt": "policy.vision.max_images",
    "mm_processor_kwargs": "policy.vision.min_pixels and max_pixels",
    "hf_token": "the environment variable HF_TOKEN",
}
_REFUSED: Sequence[tuple[str, str]] = (
    (
        "logprobs_mode generation_config override_generation_config logits_processors"
        " watermark_config diffusion_config",
        "a token's logprob must be that of the distribution it was sampled from, which the learner"
        " computes from temperature, top_p and top_k alone",
    ),
    (
        "speculative_config spec_method spec_model spec_tokens",
        "no update reaches a drafter, and the logprobs of accepted tokens are not proven",
    ),
    (
        "tokenizer tokenizer_revision tokenizer_mode hf_config_path config_format code_revision"
        " served_model_name runner convert model_class_overrides",
        "engine and learner are to read one model from one folder",
    ),
    (
        "load_format pt_load_map_location",
        "weights are read as safetensors: a pickle could run code",
    ),
    (
        "quantization quantization_config allow_deprecated_quantization",
        "updates come in policy.dtype, and quantised layers would keep the weights before them",
    ),
    (
        "worker_cls worker_extension_cls scheduler_cls io_processor_plugin reasoning_parser_plugin",
        "updates are loaded and versioned by vLLM's own classes with Flotilla's extension, and"
        " no other code may run in the engine",
    ),
    (
        "weight_transfer_config",
        "weights come from the learner's policy stream, verified byte by byte",
    ),
    (
        "default_mm_loras max_loras max_cpu_loras lora_dtype lora_target_modules",
        "every request is answered with the one adapter that the learner has published last",
    ),
    (
        "offload_backend cpu_offload_gb cpu_offload_params offload_group_size offload_num_in_group"
        " offload_prefetch_step offload_params",
        "vLLM cannot reload weights that are offloaded",
    ),
    (
        "enable_eplb eplb_config enable_elastic_ep elastic_ep_max_dp_size",
        "an update does not follow experts that are moved or copied between devices",
    ),
    (
        "kv_transfer_config kv_offloading_size kv_offloading_backend ec_transfer_config",
        "what is kept outside of the engine outlives a reload of weights",
    ),
    (
        "kv_sharing_fast_prefill",
        "it changes logprobs of prompts, by which every update is verified",
    ),
    (
        "enable_fault_tolerance fault_tolerance_config",
        "an engine that continues after a fault may hold half an update; the launcher replaces it",
    ),
    (
        "max_num_queued_reqs max_num_queued_tokens",
        "requests wait in the rollout, and those that vLLM turned away would be lost attempts",
    ),
    (
        "data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address"
        " data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb"
        " data_parallel_multi_port_external_lb data_parallel_backend",
        "engines of a replica are independent of each other: rollout.engine.data_parallel",
    ),
    (
        "nnodes node_rank master_addr master_port",
        "an update is read from this machine's shared memory: take more replicas instead",
    ),
    (
        "prefill_context_parallel_size",
        "it takes GPUs that neither the launcher nor the doctor counts",
    ),
    (
        "mm_device_do_normalize mm_encoder_only mm_encoder_attn_dtype enable_mm_embeds"
        " video_pruning_rate",
        "engine and learner are to read the same pixels, by the same tower",
    ),
    (
        "additional_config",
        "it tells Flotilla's extension which ids are never sampled",
    ),
    (
        "return_sampling_mask enable_trace_replay tokens_only",
        "nothing reads what it adds to answers",
    ),
)
REASONS: Mapping[str, str] = {name: why for names, why in _REFUSED for name in names.split()}
# Allowed values, and the reason why no other is.
_VALUES: Mapping[str, tuple[tuple[object, ...], str]] = {
    "prefix_caching_hash_algo": (
        ("sha256", "sha256_cbor"),
        "a collision would serve the cache of other weights or of another prompt",
    ),
    "distributed_executor_backend": (
        ("mp", "uni"),
        "workers are to be this machine's, and to end with the rollout",
    ),
}


@dataclass(frozen=True, slots=True)
class OptionsContext:
    """Other keys that decide whether an option may be set."""

    device: Literal["cpu", "cuda"]
    seeded: bool


def find_refusals(options: Mapping[str, Any], context: OptionsContext) -> Iterator[str]:
    """Yield `NAME: why` for each refused option."""
    for name, value in options.items():
        why = _find_refusal(name, value) or _find_refusal_on_cpu(name, value, context)
        if why:
            yield f"{name}: {why}"


def _find_refusal(name: str, value: object) -> str:
    if name in OWN_KEYS:
        return f"set {OWN_KEYS[name]} instead"
    if name in REASONS:
        return REASONS[name]
    allowed, why = _VALUES.get(name, ((value,), ""))
    if value not in allowed:
        return f"expected {' or '.join(map(str, allowed))}: {why}"
    if name == "pipeline_parallel_size" and (type(value) is not int or not 1 <= value <= 1024):
        return "expected a number of GPUs, at most 1024"
    if name == "max_logprobs" and type(value) is int and -1 < value < MOST_CANDIDATES:
        return f"expected at least {MOST_CANDIDATES}, or -1: learner.top_k may ask for as many"
    return ""


def _find_refusal_on_cpu(name: str, value: object, context: OptionsContext) -> str:
    if context.device != "cpu":
        return ""
    if name == "enable_chunked_prefill" and value and context.seeded:
        return "on a CPU a prompt in pieces and a seed end the engine: set rollout.engine.seeded"
    if name == "pipeline_parallel_size" and value != 1:
        return "on a CPU the engine ends at the first request for logprobs"
    return ""
