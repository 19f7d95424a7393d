"""Logprobs of a vocabulary as large as Gemma's, from vLLM's own sampler."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flotilla_rollout.adapters.vllm_answers import sampled_among_candidates
from flotilla_rollout.adapters.vllm_logprobs import correct_sampler, exact_log_softmax

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

VOCABULARY = 262_144
# Logits of 20 are rounded to 1.9e-6.
ROUNDING = 4e-6


def peaked_logits() -> Tensor:
    """Rows in which one token has nearly all of the probability."""
    logits = torch.randn((4, VOCABULARY), generator=torch.Generator().manual_seed(0))
    logits[:, VOCABULARY // 2] = torch.tensor([14.0, 16.0, 18.0, 20.0])
    return logits


def metadata(**changed: Any) -> Any:
    """The fields of a batch that vLLM's sampler reads."""
    return SimpleNamespace(
        **{
            "all_random": True,
            "all_greedy": False,
            "temperature": torch.ones(4),
            "max_num_logprobs": 0,
            "logprob_token_ids": None,
            "logitsprocs": SimpleNamespace(argmax_invariant=()),
            "generators": {},
            "top_k": None,
            "top_p": None,
            **changed,
        }
    )


def largest_error(found: Tensor, logits: Tensor) -> float:
    likely = VOCABULARY // 2
    return float((found.double() - logits.double().log_softmax(-1))[:, likely].abs().max())


def test_logprobs_are_exact_where_torchs_own_lose_the_unlikely_tokens() -> None:
    logits = peaked_logits()
    assert largest_error(exact_log_softmax(logits), logits) < ROUNDING
    # If this fails, torch has mended its sampler, and ours can be removed.
    assert largest_error(logits.log_softmax(-1), logits) > 5 * ROUNDING


@pytest.mark.parametrize("all_greedy", [False, True])
def test_vllms_sampler_gives_them_and_samples_the_same_tokens(all_greedy: bool) -> None:
    from vllm.v1.sample.sampler import Sampler

    logits, sampled = peaked_logits(), list[Tensor]()
    batch = metadata(all_greedy=all_greedy, all_random=not all_greedy)
    for corrected in (False, True):
        sampler = Sampler("processed_logprobs")
        if corrected:
            correct_sampler(sampler)
        torch.manual_seed(1)
        tokens, logprobs = sampler.sample(logits.clone(), batch)
        assert logprobs is not None
        sampled.append(tokens)
        if corrected:
            assert largest_error(logprobs, logits) < ROUNDING
    assert sampled[0].equal(sampled[1])


def test_tokens_that_top_k_has_removed_keep_no_probability() -> None:
    from vllm.v1.sample.sampler import Sampler

    sampler = Sampler("processed_logprobs")
    correct_sampler(sampler)
    _, logprobs = sampler.sample(peaked_logits(), metadata(top_k=torch.full((4,), 2)))
    assert logprobs is not None
    assert logprobs.isfinite().sum(-1).tolist() == [2, 2, 2, 2]
    assert torch.allclose(logprobs.exp().sum(-1), torch.ones(4))


def test_all_that_tie_for_the_last_place_are_sampled_and_those_not_named_are_mended() -> None:
    from vllm.v1.sample.sampler import Sampler

    sampler, rows = Sampler("processed_logprobs"), 256
    correct_sampler(sampler)
    logits = torch.full((rows, 32), -4.0)
    logits[:, [3, 7, 11, 20]] = torch.tensor([2.0, 1.0, 1.0, 1.0])
    # top_k = 2 keeps three that tie for the second place.
    batch = metadata(temperature=torch.ones(rows), top_k=torch.full((rows,), 2))
    torch.manual_seed(0)
    sampled, logprobs = sampler.sample(logits.clone(), batch)
    assert logprobs is not None
    assert set(sampled.tolist()) == {3, 7, 11, 20}
    named = sampler.gather_logprobs(logprobs, 2, token_ids=sampled.long())
    listed: Any = SimpleNamespace(
        token_ids=named.logprob_token_ids.flatten().tolist(),
        logprobs=named.logprobs.flatten().tolist(),
    )
    found, candidates, mended = sampled_among_candidates(listed, 2)
    likely = sampled == 3
    # Of the three, one is named.
    assert mended == sum(
        token not in given
        for token, given in zip(
            sampled.tolist(), named.logprob_token_ids[:, 1:].tolist(), strict=True
        )
    )
    assert 0 < mended < (~likely).sum()
    kept = torch.from_numpy(candidates).long()
    assert (kept == sampled[:, None]).any(1).all()
    # What the trainer computes: two candidates, of the logits 2 and 1.
    among = logits.gather(1, kept).log_softmax(-1)
    expected = among.gather(1, (kept == sampled[:, None]).long().argmax(1, keepdim=True))[:, 0]
    assert torch.allclose(torch.from_numpy(found), expected, atol=1e-6)
