"""What the engine answers is checked once, at its boundary."""

import numpy as np
import pytest

from services.common.errors import ConfigError
from services.rollout.adapters.vllm_answers import check_completion
from services.rollout.adapters.vllm_options import refuse_foreign_torchvision
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
