"""Orders that an engine cannot answer are refused by the field."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flotilla_common.rpc.errors import ServiceError
from flotilla_rollout.sampling.order_checks import EngineLimits, check_order
from flotilla_rollout.sampling.types import SamplingOrder

LIMITS = EngineLimits(max_model_len=32, vocabulary=100, most_topk=20)
ORDER = SamplingOrder(
    prompt_ids=np.arange(16, dtype=np.int32),
    num_samples=1,
    max_tokens=16,
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    seed=None,
    stop_strings=(),
    stop_ids=(),
    prompt_logprobs=False,
    topk=0,
)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 0},
        {"num_samples": 0, "topk": 20},
        {"num_samples": 0, "prompt_logprobs": True, "max_tokens": 0},
        {"temperature": 0.0, "top_k": 1, "top_p": 0.1, "seed": -5},
        {"stop_strings": ("a", "b"), "stop_ids": (0, 99)},
    ],
)
def test_an_order_within_the_limits_passes(fields: dict[str, Any]) -> None:
    check_order(replace(ORDER, **fields), LIMITS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_ids": np.zeros(0, np.int32)}, "BAD_REQUEST: prompt_ids: there are none"),
        ({"prompt_ids": np.array([0, 100], np.int32)}, "BAD_REQUEST: prompt_ids: 0 to 100"),
        ({"prompt_ids": np.array([-1], np.int32)}, "BAD_REQUEST: prompt_ids: -1 to -1"),
        ({"max_tokens": 17}, "TOO_LONG: prompt_ids has 16 tokens, and 17 more"),
        ({"prompt_ids": np.zeros(32, np.int32), "max_tokens": 0}, "TOO_LONG"),
        ({"num_samples": 0}, "BAD_REQUEST: num_samples: 0"),
        ({"num_samples": 1025}, "BAD_REQUEST: num_samples: 1025"),
        ({"max_tokens": -1}, "BAD_REQUEST: max_tokens: -1"),
        ({"first_answer": -1}, "BAD_REQUEST: first_answer: -1"),
        ({"temperature": -1.0}, "BAD_REQUEST: temperature: -1"),
        ({"temperature": 0.001}, "BAD_REQUEST: temperature: 0.001"),
        ({"temperature": float("nan")}, "BAD_REQUEST: temperature: nan"),
        ({"top_p": 0.0}, "BAD_REQUEST: top_p: 0"),
        ({"top_p": float("nan")}, "BAD_REQUEST: top_p: nan"),
        ({"top_k": 0}, "BAD_REQUEST: top_k: 0"),
        ({"topk": 21}, "BAD_REQUEST: topk_prompt_logprobs: 21"),
        ({"stop_strings": ("a", "")}, "BAD_REQUEST: stop_strings: one is empty"),
        ({"stop_strings": ("a",) * 65}, "BAD_REQUEST: stop_strings and stop_ids: more than 64"),
        ({"stop_ids": (5, 100)}, "BAD_REQUEST: stop_ids: 100"),
    ],
)
def test_a_refusal_names_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ServiceError) as refused:
        check_order(replace(ORDER, **fields), LIMITS)
    assert str(refused.value).startswith(message)


def test_more_logprobs_of_a_prompt_than_a_message_holds_are_refused() -> None:
    prompt = np.zeros(10_000, np.int32)
    limits = EngineLimits(max_model_len=20_000, vocabulary=100, most_topk=20)
    check_order(replace(ORDER, prompt_ids=prompt, topk=13), limits)
    with pytest.raises(ServiceError, match="topk_prompt_logprobs: 14 for 10000 tokens are"):
        check_order(replace(ORDER, prompt_ids=prompt, topk=14), limits)
