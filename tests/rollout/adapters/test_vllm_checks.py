"""What the engine answers is checked once, at its boundary."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from services.common.errors import ConfigError
from services.common.spec import PolicyConfig
from services.rollout.adapters.vllm_answers import check_completion
from services.rollout.adapters.vllm_options import (
    ServedModel,
    engine_options,
    refuse_foreign_torchvision,
    set_environment,
)
from services.rollout.config.rollout import EngineConfig
from services.rollout.ports import EngineError
from services.rollout.types import Completion, PolicySpan
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
