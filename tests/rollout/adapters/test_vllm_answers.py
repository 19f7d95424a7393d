"""What a token was sampled from, as vLLM lists it: the sampled token, then the likeliest."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flotilla_rollout.adapters.vllm_answers import sampled_among_candidates

GONE = -math.inf


def flat(*positions: list[tuple[int, float]]) -> Any:
    pairs = [pair for position in positions for pair in position]
    return SimpleNamespace(token_ids=[i for i, _ in pairs], logprobs=[x for _, x in pairs])


def logs(*probabilities: float) -> list[float]:
    return [math.log(each) for each in probabilities]


def test_ids_with_a_finite_logprob_are_the_candidates() -> None:
    half, third, sixth = logs(1 / 2, 1 / 3, 1 / 6)
    listed = flat(
        [(8, third), (5, half), (8, third), (9, sixth)], [(7, 0.0), (7, 0.0), (0, GONE), (1, GONE)]
    )
    logprobs, candidates, mended = sampled_among_candidates(listed, 3)
    assert candidates.tolist() == [[5, 8, 9], [7, -1, -1]]
    assert candidates.dtype == np.int32 and logprobs.dtype == np.float32
    assert logprobs.tolist() == pytest.approx([third, 0.0])
    assert mended == 0


def test_a_token_that_ties_for_the_last_place_takes_that_of_the_one_listed() -> None:
    """vLLM keeps all that tie, here three of top_k = 2, and lists two."""
    half, quarter = logs(1 / 2, 1 / 4)
    listed = flat([(6, quarter), (3, half), (4, quarter)], [(3, half), (3, half), (4, quarter)])
    logprobs, candidates, mended = sampled_among_candidates(listed, 2)
    assert candidates.tolist() == [[3, 6], [3, 4]]
    # Among the two that the trainer is told of.
    assert logprobs.tolist() == pytest.approx(logs(1 / 3, 2 / 3))
    assert mended == 1


def test_a_request_that_ends_before_its_first_token_has_none() -> None:
    logprobs, candidates, mended = sampled_among_candidates(flat(), 4)
    assert (logprobs.shape, candidates.shape, mended) == ((0,), (0, 4), 0)


def test_a_logprob_that_rounding_has_raised_above_0_is_0() -> None:
    listed = flat([(7, 3e-8), (7, 3e-8), (0, GONE)])
    assert sampled_among_candidates(listed, 2)[0].tolist() == [0.0]
