"""The engine's answers are checked once, at its boundary."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import numpy as np
import pytest

from flotilla_common.images.vision_family import load_vision_family
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import PolicyConfig, VisionConfig
from flotilla_rollout.adapters.vllm_answers import check_completion
from flotilla_rollout.adapters.vllm_experts import EngineExperts
from flotilla_rollout.adapters.vllm_options import (
    ServedModel,
    engine_options,
    refuse_foreign_torchvision,
    set_environment,
)
from flotilla_rollout.config.rollout import EngineConfig
from flotilla_rollout.ports import EngineError
from flotilla_rollout.types import Completion, PolicySpan, Sampling
from tests.support.rollout import POLICY


def completion(logprobs: list[float], spanned: int = 2) -> Completion:
    spans = (PolicySpan(POLICY, spanned),) if spanned else ()
    return Completion(np.array([1, 2], np.int32), np.array(logprobs, np.float32), spans, cut=False)


def test_an_answer_that_is_whole_passes() -> None:
    whole = completion([-0.5, 0.0])
    assert check_completion(whole) is whole


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (completion([-0.5]), "1 logprobs"),
        (completion([-0.5, -0.5], spanned=0), "policies of 0"),
        (completion([-0.5, float("nan")]), "no number"),
        (completion([-0.5, float("-inf")]), "no number"),
    ],
)
def test_an_answer_with_holes_is_an_engine_error(broken: Completion, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        check_completion(broken)


def test_a_cuda_torchvision_beside_a_cpu_torch_is_refused_with_the_fix() -> None:
    with pytest.raises(ConfigError, match="pip uninstall -y torchvision"):
        refuse_foreign_torchvision({"torch": "2.13.0+cpu", "torchvision": "0.28.0"})
    refuse_foreign_torchvision({"torch": "2.13.0+cpu"})
    refuse_foreign_torchvision({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"})
    refuse_foreign_torchvision({"torch": "2.13.0", "torchvision": "0.28.0"})


def options(index: int = 0, **keys: Any) -> dict[str, Any]:
    policy = PolicyConfig(model="m", max_model_len=8)
    return engine_options(EngineConfig(**keys), ServedModel(Path("m"), policy, ()), index)


def test_engines_of_a_replica_get_gpus_of_their_own() -> None:
    sizes = {"tensor_parallel": 2, "data_parallel": 3}
    assert [options(index, **sizes)["device_ids"] for index in range(3)] == [[0, 1], [2, 3], [4, 5]]
    stages = {**sizes, "options": {"pipeline_parallel_size": 2}}
    assert options(1, **stages)["device_ids"] == [4, 5, 6, 7]
    assert "device_ids" not in options(device="cpu", data_parallel=2)
    assert "device_ids" not in options(tensor_parallel=2)


def test_a_gpu_names_experts_by_itself_where_they_are_replayed() -> None:
    policy = PolicyConfig(model="m", max_model_len=8, routing_replay="replay")
    served = ServedModel(Path("m"), policy, ())
    assert engine_options(EngineConfig(), served)["enable_return_routed_experts"] is True
    on_cpu = engine_options(EngineConfig(device="cpu"), served)
    assert "enable_return_routed_experts" not in on_cpu | options()


def test_an_engine_is_shown_pictures_only_where_the_policy_sees(
    vision_folder: Callable[[str], Path],
) -> None:
    assert options()["language_model_only"] is True
    folder = vision_folder("qwen3_vl")
    vision = VisionConfig(max_images=5, max_pixels=2**20)
    policy = PolicyConfig(model="m", max_model_len=512, vision=vision)
    given = engine_options(EngineConfig(device="cpu"), ServedModel(folder, policy, ()))
    assert "language_model_only" not in given
    assert given["limit_mm_per_prompt"] == {"image": 5, "video": 0}
    # Not more than a sequence holds: a CPU's engine computes a prompt at once.
    assert given["mm_processor_kwargs"]["size"]["longest_edge"] == 512 * 32 * 32
    banned = load_vision_family(folder, vision).banned_ids
    assert given["additional_config"] == {"flotilla_banned_ids": list(banned)}


class NamingEngine:
    """An engine whose workers know the experts of the given number of tokens."""

    def __init__(self, rows: int) -> None:
        self.experts = np.arange(rows * 4, dtype=np.uint8).reshape(rows, 2, 2)

    async def collective_rpc(self, name: str, args: tuple[str]) -> list[Any]:
        assert (name, args) == ("take_flotilla_experts", ("r",))
        found = (list(self.experts.shape), 1, self.experts.tobytes())
        return [found if len(self.experts) else None, None]


def finished(sampled: int, experts: Any = None) -> Any:
    """An answer to a prompt of five tokens."""
    output = SimpleNamespace(token_ids=list(range(sampled)), routed_experts=experts)
    return SimpleNamespace(request_id="r", prompt_token_ids=list(range(5)), outputs=[output])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
async def test_the_experts_of_an_answer_are_those_of_all_tokens_but_the_last(
    device: Literal["cpu", "cuda"],
) -> None:
    llm: Any = NamingEngine(rows=8)
    named = EngineExperts(llm, device)
    sampling = Sampling(1.0, experts_from=3)
    found = await named.take_experts(finished(4, llm.experts), sampling)
    assert found is not None
    np.testing.assert_array_equal(found, llm.experts[:5])
    assert await named.take_experts(finished(0), sampling) is None
    field = {"cpu": "extra_args", "cuda": "routed_experts_prompt_start"}[device]
    assert list(named.request_fields(sampling)) == [field]


@pytest.mark.parametrize("rows", [0, 4])
async def test_experts_that_are_missing_are_an_engine_error(rows: int) -> None:
    llm: Any = NamingEngine(rows)
    with pytest.raises(EngineError, match=f"experts of {rows} tokens; 5 were computed"):
        await EngineExperts(llm, "cpu").take_experts(finished(4), Sampling(1.0, experts_from=3))


def test_engines_without_seeds_of_attempts_draw_numbers_of_their_own() -> None:
    assert len({options(seeded=False)["seed"] for _ in range(4)}) > 1
    assert options()["seed"] == options()["seed"]


@pytest.mark.parametrize(
    ("keys", "bound"),
    [
        ({"device": "cpu"}, None),
        ({"device": "cpu", "tensor_parallel": 2}, "nobind"),
        ({"device": "cpu", "data_parallel": 2}, "nobind"),
        ({"device": "cpu", "data_parallel": 2, "env": {"VLLM_CPU_OMP_THREADS_BIND": "0"}}, "0"),
        ({"device": "cuda", "tensor_parallel": 2}, None),
    ],
)
def test_workers_on_a_cpu_are_bound_to_no_core_when_there_are_several(
    keys: dict[str, Any], bound: str | None
) -> None:
    with mock.patch.dict(os.environ):
        os.environ.pop("VLLM_CPU_OMP_THREADS_BIND", None)
        set_environment(EngineConfig(**keys), local=True)
        assert os.environ.get("VLLM_CPU_OMP_THREADS_BIND") == bound
