"""Engine options that would silently break a run are refused, each with its reason."""

from typing import Any

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_common.spec.spec import SharedConfig
from flotilla_rollout.config.rollout import RolloutConfig


def engine(options: dict[str, Any], **keys: Any) -> RolloutConfig:
    section = {
        "max_input_length": 8,
        "max_generate_length": 8,
        "engine": {"options": options, **keys},
    }
    return parse_config(RolloutConfig, section, where="spec", section="rollout")


def refusal(options: dict[str, Any], **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        engine(options, **keys)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("model", "other", "policy.model"),
        ("max_model_len", 4096, "policy.max_model_len"),
        ("dtype", "float16", "policy.dtype"),
        ("max_num_seqs", 8, "rollout.engine.max_num_seqs"),
        ("tensor_parallel_size", 2, "rollout.engine.tensor_parallel"),
        ("seed", 3, "rollout.engine.seeded"),
        ("enable_return_routed_experts", True, "policy.routing_replay"),
    ],
)
def test_an_option_with_a_key_of_its_own_names_that_key(
    name: str, value: object, instead: str
) -> None:
    assert refusal({name: value}).splitlines()[1] == (
        f"  rollout.engine.options.{name}: set {instead} instead"
    )


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("logprobs_mode", "raw_logprobs", "the distribution it was sampled from"),
        ("generation_config", "auto", "temperature, top_p and top_k alone"),
        ("max_logprobs", 20, "at least 64, or -1: learner.top_k may ask for as many"),
        ("speculative_config", {"method": "ngram"}, "no update reaches a drafter"),
        ("load_format", "pt", "a pickle could run code"),
        ("quantization", "fp8", "would keep the weights before them"),
        ("worker_extension_cls", "mine.Loader", "no other code"),
        ("enable_lora", True, "set policy.adapter_rank instead"),
        ("cpu_offload_gb", 4, "cannot reload weights that are offloaded"),
        ("kv_transfer_config", {}, "outlives a reload of weights"),
        ("kv_sharing_fast_prefill", True, "by which every update is verified"),
        ("data_parallel_rank", 1, "rollout.engine.data_parallel"),
        ("nnodes", 2, "take more replicas instead"),
        ("prefix_caching_hash_algo", "xxhash", "expected sha256 or sha256_cbor: a collision"),
        ("distributed_executor_backend", "ray", "expected mp or uni"),
        ("pipeline_parallel_size", 0, "expected a number of GPUs"),
        ("pipeline_parallel_size", "2", "expected a number of GPUs"),
    ],
)
def test_an_option_that_breaks_a_run_is_refused_with_the_reason(
    name: str, value: object, why: str
) -> None:
    error = refusal({name: value})
    assert f"rollout.engine.options.{name}: " in error
    assert why in error


def test_all_options_that_are_refused_are_named_at_once() -> None:
    error = refusal({"model": "other", "enable_lora": True, "moe_backend": "triton"})
    assert "options.model: " in error
    assert "options.enable_lora: " in error
    assert "moe_backend" not in error


def test_what_a_cpu_cannot_do_is_refused_there_alone() -> None:
    assert "in pieces and a seed" in refusal({"enable_chunked_prefill": True}, device="cpu")
    assert "ends at the first request" in refusal({"pipeline_parallel_size": 2}, device="cpu")
    engine({"enable_chunked_prefill": True}, device="cpu", seeded=False)
    engine({"enable_chunked_prefill": True})


def test_stages_of_a_pipeline_count_as_gpus() -> None:
    sizes = {"tensor_parallel": 2, "data_parallel": 2}
    assert engine({"pipeline_parallel_size": 3}, **sizes).engine.workers == 12
    assert engine({}, **sizes).engine.workers == 4


def test_options_that_nothing_speaks_against_pass() -> None:
    options = {
        "moe_backend": "triton",
        "enable_expert_parallel": True,
        "enable_prefix_caching": False,
        "kv_cache_dtype": "auto",
        "distributed_executor_backend": "mp",
        "compilation_config": {"mode": 0},
    }
    assert engine(options).engine.options == options


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"device": "cpu", "enforce_eager": False}, r"engine\.enforce_eager: .* as its layers run"),
        ({"options": {"pipeline_parallel_size": 2}}, "vLLM names no experts across stages"),
    ],
)
def test_experts_that_cannot_be_recorded_are_refused(keys: dict[str, Any], error: str) -> None:
    policy = {"model": "m", "max_model_len": 64}
    config = engine(keys.pop("options", {}), **keys)
    config.check(SharedConfig.model_validate({"name": "x", "policy": policy}))
    replayed = {**policy, "routing_replay": "replay"}
    with pytest.raises(ConfigError, match=error):
        config.check(SharedConfig.model_validate({"name": "x", "policy": replayed}))
