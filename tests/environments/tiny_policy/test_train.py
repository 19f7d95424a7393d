"""The model, its training and its sampler."""

import random
from itertools import islice

import pytest
import torch
from transformers import Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from flotilla_environments.tiny_policy.evaluate import Score
from flotilla_environments.tiny_policy.model import Shape, build_model
from flotilla_environments.tiny_policy.sampler import Limits, left_padded, sample_turns
from flotilla_environments.tiny_policy.train import (
    Example,
    Schedule,
    collate_batch,
    length_bucketed,
    policy_loss,
    warm_start,
)

SMALL = Shape(hidden=16, layers=2, heads=2, head_dim=8, feed_forward=32)
PAD, END = 0, 1


def small_model(seed: int = 0) -> Qwen3ForCausalLM:
    model = build_model(SMALL, vocab_size=50, eos_token_id=END, pad_token_id=PAD, seed=seed)
    return model.eval()


def examples(count: int) -> list[Example]:
    rng = random.Random(0)
    lengths = [rng.randint(4, 30) for _ in range(count)]
    return [
        Example([rng.randrange(2, 50) for _ in range(n)], [i > 1 for i in range(n)])
        for n in lengths
    ]


def test_attention_starts_by_copying_what_it_attends_to() -> None:
    modules = [m for m in small_model().modules() if isinstance(m, Qwen3Attention)]
    assert len(modules) == SMALL.layers
    for module in modules:
        product = module.o_proj.weight @ module.v_proj.weight
        assert torch.allclose(product, torch.eye(SMALL.hidden), atol=1e-5)


def test_a_shape_without_square_projections_is_refused() -> None:
    with pytest.raises(ValueError, match="must equal hidden"):
        build_model(Shape(hidden=48), vocab_size=9, eos_token_id=1, pad_token_id=0, seed=0)


def test_the_demo_policy_has_a_fifth_of_a_million_parameters() -> None:
    model = build_model(Shape(), vocab_size=1_400, eos_token_id=1, pad_token_id=0, seed=0)
    assert sum(p.numel() for p in model.parameters()) < 200_000


def test_the_loss_sees_the_policys_tokens_only_and_no_padding() -> None:
    model = small_model()
    short, long = Example([5, 6, 7, 8], [False, False, True, True]), examples(1)[0]
    alone = [policy_loss(model, *collate_batch([example], PAD)) for example in (short, long)]
    sizes = [2, sum(long.policy)]
    together = policy_loss(model, *collate_batch([short, long], PAD))
    expected = (alone[0] * sizes[0] + alone[1] * sizes[1]) / sum(sizes)
    assert together.item() == pytest.approx(expected.item(), abs=1e-5)
    logprobs = model(input_ids=torch.tensor([short.ids])).logits[0].log_softmax(-1)
    assert alone[0].item() == pytest.approx(-(logprobs[1, 7] + logprobs[2, 8]).item() / 2, abs=1e-5)


def test_the_first_token_is_never_a_target() -> None:
    ids, targets = collate_batch([Example([5, 6, 7], [True, True, True])], PAD)
    assert ids.tolist() == [[5, 6]]
    assert targets.tolist() == [[6, 7]]


def test_the_learning_rate_warms_up_and_falls_to_its_final_fraction() -> None:
    schedule = Schedule()
    rates = [schedule.rate(step) for step in range(schedule.steps)]
    assert rates[0] == pytest.approx(schedule.learning_rate / schedule.warmup_steps)
    assert max(rates) == pytest.approx(schedule.learning_rate, rel=1e-2)
    assert rates[-1] == pytest.approx(0.1 * schedule.learning_rate, rel=1e-2)


def test_batches_are_full_similar_in_length_and_without_repeats_in_a_pass() -> None:
    data = examples(200)
    batches = list(islice(length_bucketed(data, 8, random.Random(0)), 200 // 8))
    used = [id(example) for batch in batches for example in batch]
    assert all(len(batch) == 8 for batch in batches)
    assert len(used) == len(set(used)) == 200
    waste = [max(len(e.ids) for e in b) - min(len(e.ids) for e in b) for b in batches]
    assert sum(waste) / len(waste) < 6


def test_too_few_examples_for_a_batch_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot fill a batch"):
        next(length_bucketed(examples(3), 8, random.Random(0)))


def test_training_lowers_the_loss_and_repeats_bit_for_bit() -> None:
    data = examples(16)
    runs: list[tuple[list[float], Qwen3ForCausalLM]] = []
    for _ in range(2):
        model, losses = small_model(), list[float]()
        warm_start(
            model,
            data,
            Schedule(steps=100),
            pad_token_id=PAD,
            seed=0,
            on_step=lambda _, loss, losses=losses: losses.append(loss),
        )
        runs.append((losses, model))
    assert runs[0][0] == runs[1][0]
    assert runs[0][0][-1] < runs[0][0][0] - 0.5
    for one, other in zip(runs[0][1].parameters(), runs[1][1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_padding_stands_on_the_left_where_the_next_token_does_not_see_it() -> None:
    ids, mask = left_padded([[5, 6, 7], [8]])
    assert ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampled_logprobs_are_those_of_a_plain_forward_pass(temperature: float) -> None:
    model = small_model()
    sampled = [[5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15]]
    limits = Limits(frozenset({END}), max_new_tokens=12, temperature=temperature)
    turns = sample_turns(model, sampled, limits, torch.Generator().manual_seed(0))
    for prompt, turn in zip(sampled, turns, strict=True):
        assert len(turn.ids) == 12 or turn.ids[-1] == END
        ids = torch.tensor([prompt + turn.ids])
        logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
        start = len(prompt) - 1
        for offset, (token, logprob) in enumerate(zip(turn.ids, turn.logprobs, strict=True)):
            assert logprobs[start + offset, token].item() == pytest.approx(logprob, abs=1e-4)
        if temperature == 0:
            assert turn.ids == logprobs[start:-1].argmax(-1).tolist()


def test_a_turn_ends_at_its_stop_token_while_others_continue() -> None:
    limits = Limits(frozenset(range(25)), max_new_tokens=8)
    turns = sample_turns(small_model(), [[5, 6]] * 16, limits, torch.Generator().manual_seed(0))
    for turn in turns:
        assert all(token >= 25 for token in turn.ids[:-1])
        assert turn.ids[-1] < 25 or len(turn.ids) == 8
    assert len({len(turn.ids) for turn in turns}) > 1


def test_the_interval_of_a_pass_rate_is_wilsons() -> None:
    low, high = Score(solved=10, attempts=100).interval
    assert (low, high) == (pytest.approx(0.0552, abs=1e-4), pytest.approx(0.1744, abs=1e-4))
    assert Score(solved=0, attempts=192).interval[0] == pytest.approx(0.0)
    assert Score(solved=192, attempts=192).interval[1] == pytest.approx(1.0)
