"""Sampling by Tinker's own client."""

from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.tinker.client.served import (
    Served,
    client_of,
    client_tests,
    example,
    logprobs_of,
    new_trainer,
    prompt_of,
    sample,
    sampled_logprobs_of,
    tinker,
    train_step,
)
from tests.tinker.client.stage import MODEL

pytestmark = client_tests

PROMPT = tuple(range(300, 320))
# Of the trainer and the engine, in float32.
AGREE = 1e-4


@pytest.fixture
def base(client: Any) -> Any:
    return client.create_sampling_client(base_model=MODEL).result()


@pytest.fixture
def learned(trainer: Any) -> Any:
    """A sampler whose model repeats the prompt's tokens in order."""
    for _ in range(60):
        train_step(trainer, [example(PROMPT)])
    return trainer.save_weights_and_get_sampling_client().result()


def texts(result: Any) -> list[tuple[int, ...]]:
    return [tuple(each.tokens) for each in result.sequences]


def test_the_base_answers_with_logprobs_and_ids(base: Any) -> None:
    result = sample(base, PROMPT, num_samples=3)
    assert len({each.sequence_id for each in result.sequences}) == 3
    for each in result.sequences:
        assert len(each.tokens) == len(each.logprobs) <= 8
        assert all(value <= 0 for value in each.logprobs)


def test_a_trained_model_says_what_it_learned(learned: Any, base: Any) -> None:
    greedy = sample(learned, PROMPT[:5], temperature=0.0, max_tokens=4)
    assert texts(greedy) == [PROMPT[5:9]]
    assert texts(sample(base, PROMPT[:5], temperature=0.0, max_tokens=4)) != [PROMPT[5:9]]


def test_the_logprobs_of_samples_are_those_of_the_prompt(base: Any) -> None:
    (answer,) = sample(base, PROMPT).sequences
    whole = sampled_logprobs_of(base, (*PROMPT, *answer.tokens))
    assert answer.logprobs == pytest.approx(whole[len(PROMPT) - 1 :], abs=AGREE)


def test_top_k_of_1_is_greedy(base: Any) -> None:
    greedy = texts(sample(base, PROMPT, temperature=0.0))
    assert texts(sample(base, PROMPT, num_samples=4, top_k=1)) == greedy * 4


def test_samples_of_a_prompt_differ(base: Any) -> None:
    result = sample(base, PROMPT, num_samples=16, temperature=2.0)
    assert len({*texts(result)}) > 8


def test_a_seed_repeats_samples_and_another_does_not(base: Any) -> None:
    def drawn(seed: int) -> list[tuple[int, ...]]:
        return texts(sample(base, PROMPT, num_samples=4, seed=seed, temperature=2.0))

    assert drawn(3) == drawn(3) != drawn(4)
    # The samples of a request are different ones.
    assert len({*drawn(3)}) > 1


def test_a_sample_ends_at_its_limit(learned: Any) -> None:
    (answer,) = sample(learned, PROMPT[:5], max_tokens=3, temperature=0.0).sequences
    assert (len(answer.tokens), answer.stop_reason) == (3, "length")


def test_a_sample_ends_with_a_stop_token(learned: Any) -> None:
    result = sample(learned, PROMPT[:5], temperature=0.0, stop=[PROMPT[7]])
    (answer,) = result.sequences
    assert (tuple(answer.tokens), answer.stop_reason) == (PROMPT[5:8], "stop")


def test_a_sample_ends_with_a_stop_string(learned: Any, stage: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stage / MODEL)
    mark = tokenizer.decode([PROMPT[7]])
    (answer,) = sample(learned, PROMPT[:5], temperature=0.0, stop=[mark]).sequences
    assert answer.stop_reason == "stop"
    assert tokenizer.decode(answer.tokens).endswith(mark)
    assert len(answer.tokens) == len(answer.logprobs) == 3


def test_top_k_logprobs_of_a_prompt_hold_its_own(base: Any) -> None:
    params = tinker.SamplingParams(max_tokens=1)
    result = base.sample(
        prompt_of(PROMPT), 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=5
    ).result()
    assert result.prompt_logprobs[0] is result.topk_prompt_logprobs[0] is None
    for own, token, best in zip(
        result.prompt_logprobs[1:], PROMPT[1:], result.topk_prompt_logprobs[1:], strict=True
    ):
        values = [value for _, value in best]
        assert len(best) == 5 and values == sorted(values, reverse=True)
        assert own <= values[0] + AGREE
        if token in dict(best):
            assert dict(best)[token] == pytest.approx(own, abs=AGREE)


@pytest.mark.parametrize("rank", [8, 0])
def test_sampler_and_trainer_agree_after_each_save(client: Any, rank: int) -> None:
    trainer = new_trainer(client, rank=rank)
    for _ in range(3):
        train_step(trainer, [example(PROMPT)])
        sampler = trainer.save_weights_and_get_sampling_client().result()
        expected = logprobs_of(trainer, PROMPT)
        assert sampled_logprobs_of(sampler, PROMPT) == pytest.approx(expected, abs=AGREE)


def test_a_snapshot_does_not_move(trainer: Any) -> None:
    sampler = trainer.save_weights_and_get_sampling_client().result()
    before = sampled_logprobs_of(sampler, PROMPT)
    train_step(trainer, [example(PROMPT)])
    trainer.save_weights_and_get_sampling_client().result()
    assert sampled_logprobs_of(sampler, PROMPT) == pytest.approx(before, abs=1e-6)


def test_an_inflight_sampler_follows_its_model(trainer: Any) -> None:
    old = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
    before = sampled_logprobs_of(old, PROMPT)
    train_step(trainer, [example(PROMPT)])
    new = trainer.save_weights_and_get_sampling_client(kind="inflight").result()
    expected = logprobs_of(trainer, PROMPT)
    assert np.abs(expected - before).max() > 1e-3
    for sampler in (old, new):
        assert sampled_logprobs_of(sampler, PROMPT) == pytest.approx(expected, abs=AGREE)


def test_a_named_sampler_serves_another_session(trainer: Any, served: Served) -> None:
    train_step(trainer, [example(PROMPT)])
    path = trainer.save_weights_for_sampler("shared").result().path
    expected = logprobs_of(trainer, PROMPT)
    with client_of(served) as other:
        sampler = other.create_sampling_client(model_path=path).result()
        assert sampler.get_base_model() == MODEL
        assert sampled_logprobs_of(sampler, PROMPT) == pytest.approx(expected, abs=AGREE)


def test_a_handle_of_a_sampler_samples_too(base: Any, served: Served) -> None:
    again = tinker.SamplingClient.from_sampler_handle(base.get_sampler_handle(), api_key=served.key)
    assert sampled_logprobs_of(again, PROMPT) == pytest.approx(
        sampled_logprobs_of(base, PROMPT), abs=1e-6
    )


def test_1024_single_samples_are_answered_concurrently(base: Any) -> None:
    params = tinker.SamplingParams(max_tokens=4, temperature=1.0)
    sent = [base.sample(prompt_of((*PROMPT, 10 + i % 100)), 1, params) for i in range(1024)]
    results = [each.result(timeout=600) for each in sent]
    assert all(len(each.sequences) == 1 for each in results)
    assert len({each.sequences[0].sequence_id for each in results}) == 1024


def test_an_abandoned_sample_leaves_the_sampler_usable(base: Any) -> None:
    params = tinker.SamplingParams(max_tokens=1500, stop=[])
    abandoned = [base.sample(prompt_of(PROMPT), 4, params).future() for _ in range(4)]
    for each in abandoned:
        each.cancel()
    assert len(sample(base, PROMPT).sequences) == 1
    assert not [each for each in as_completed(abandoned) if not each.cancelled()]
