"""A step with a teacher: what it adds to advantages and loss is what plain torch computes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flotilla_learner.config.algorithm import AlgorithmConfig, DistillationConfig
from flotilla_learner.rank.model import Policy
from flotilla_learner.types import StepSettings, TeacherScores, TrainBatch
from tests.learner.algo.test_distillation import CHOICES, merge_rest, plain_divergence
from tests.support.tiny_ranks import VOCAB, make_batch, make_trainer, parameters, same_bits

K = 4


def teach(batch: TrainBatch, *, top_k: int = 0, seed: int = 7) -> TrainBatch:
    """Scores of a teacher that is a table of random logits by the token before; temperature 1."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(VOCAB, VOCAB, generator=generator).log_softmax(-1)
    taught: list[Any] = []
    for each in batch.sequences:
        places = np.flatnonzero(each.policy_mask)
        rows = table[torch.from_numpy(each.token_ids[places - 1].astype(np.int64))]
        own = torch.from_numpy(each.token_ids[places].astype(np.int64))
        top, ids = rows.topk(top_k)
        scores = TeacherScores(
            rows.gather(1, own[:, None]).squeeze(1).numpy(), ids.int().numpy(), top.numpy()
        )
        taught.append(replace(each, temperature=1.0, teacher=scores))
    return replace(batch, sequences=tuple(taught), settings=StepSettings(taught=True))


def distilling(**values: Any) -> AlgorithmConfig:
    return AlgorithmConfig(distillation=DistillationConfig(**values))


def policy_rows(policy: Policy, batch: TrainBatch) -> Tensor:
    """The policy's own log-softmax at each policy token, [tokens, vocabulary]."""
    rows: list[Tensor] = []
    for each in batch.sequences:
        ids = torch.from_numpy(each.token_ids.astype(np.int64))
        found = policy.model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        rows.append(found[torch.from_numpy(each.policy_mask[1:])].float().log_softmax(-1))
    return torch.cat(rows)


def scores_of(batch: TrainBatch) -> tuple[Tensor, Tensor, Tensor]:
    found = [each.teacher for each in batch.sequences if each.teacher is not None]
    columns = zip(*((s.logprobs, s.top_ids, s.top_logprobs) for s in found), strict=True)
    logprobs, ids, top = (torch.from_numpy(np.concatenate(each)) for each in columns)
    return logprobs, ids.long(), top


def test_sampled_tokens_move_by_how_much_likelier_the_teacher_finds_them(
    model_folder: Path,
) -> None:
    policy, _, trainer = make_trainer(model_folder, algorithm=distilling(weight=0.5, alone=True))
    batch = teach(make_batch(policy))
    tokens = trainer.train_step(batch, lr=1e-3).tokens
    assert tokens is not None
    for each, found in zip(batch.sequences, tokens.advantages, strict=True):
        assert each.teacher is not None
        expected = 0.5 * (each.teacher.logprobs - each.behaviour_logprobs[each.policy_mask])
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


def test_the_teacher_adds_to_what_rewards_teach(model_folder: Path) -> None:
    policy, _, rewarded = make_trainer(model_folder)
    batch = teach(make_batch(policy))
    plain = rewarded.train_step(replace(batch, settings=StepSettings()), lr=1e-3).tokens
    _, _, trainer = make_trainer(model_folder, algorithm=distilling(weight=2.0))
    both = trainer.train_step(batch, lr=1e-3).tokens
    assert plain is not None and both is not None
    for each, own, found in zip(batch.sequences, plain.advantages, both.advantages, strict=True):
        assert each.teacher is not None
        gap = each.teacher.logprobs - each.behaviour_logprobs[each.policy_mask]
        np.testing.assert_allclose(found, own + 2.0 * gap, rtol=0, atol=1e-5)


def test_its_gradient_is_that_of_the_policy_gradient_with_the_gap_as_advantage(
    model_folder: Path,
) -> None:
    algorithm = AlgorithmConfig(
        loss="importance_sampling",
        distillation=DistillationConfig(alone=True),
    )
    policy, _, trainer = make_trainer(model_folder, algorithm=algorithm, grad_clip=0.0)
    batch = make_batch(policy)
    sequences = [replace(each, temperature=1.0) for each in batch.sequences]
    batch = teach(replace(batch, sequences=tuple(sequences)))
    own = torch.cat(
        [torch.from_numpy(s.behaviour_logprobs[s.policy_mask]) for s in batch.sequences]
    )
    teacher, _, _ = scores_of(batch)
    sampled = torch.cat(
        [torch.from_numpy(s.token_ids[s.policy_mask].astype(np.int64)) for s in batch.sequences]
    )
    logprobs = policy_rows(policy, batch).gather(1, sampled[:, None]).squeeze(1)
    (-((logprobs - own).exp() * (teacher - own)).mean()).backward()
    expected = take_norm(policy)
    metrics = trainer.train_step(batch, lr=1e-3).metrics
    assert metrics["policy/grad_norm"] == pytest.approx(expected, rel=1e-5)
    assert metrics["teacher/reverse_kl"] == pytest.approx(float((own - teacher).mean()), abs=1e-6)


def take_norm(policy: Policy) -> float:
    found = [p.grad for p in policy.trained_parameters().values() if p.grad is not None]
    norm = float(torch.stack([gradient.double().norm() for gradient in found]).norm())
    for parameter in policy.trained_parameters().values():
        parameter.grad = None
    return norm


@pytest.mark.parametrize("values", CHOICES)
def test_over_the_likeliest_tokens_loss_and_gradient_are_plain_torchs(
    model_folder: Path, values: dict[str, Any]
) -> None:
    algorithm = distilling(alone=True, weight=3.0, top_k=K, **values)
    policy, _, trainer = make_trainer(model_folder, algorithm=algorithm)
    batch = teach(make_batch(policy), top_k=K)
    _, ids, top = scores_of(batch)
    rest = torch.log1p(-top.exp().sum(1, keepdim=True))
    own = merge_rest(policy_rows(policy, batch), ids)
    mean = plain_divergence(own, torch.cat([top, rest], 1), algorithm.distillation).mean()
    (3.0 * mean).backward()
    expected = take_norm(policy)
    metrics = trainer.train_step(batch, lr=1e-3).metrics
    assert metrics["teacher/divergence"] == pytest.approx(float(mean.detach()), abs=1e-6)
    assert metrics["policy/loss"] == pytest.approx(3.0 * float(mean.detach()), abs=3e-6)
    assert metrics["policy/grad_norm"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("loss", ["ppo_clip", "gspo"])
def test_packs_and_chunks_change_no_loss(model_folder: Path, loss: str) -> None:
    """Also where a loss needs whole sequences: then all chunks are scored first."""
    algorithm = AlgorithmConfig(loss=loss, distillation=DistillationConfig(top_k=K))
    losses: list[float] = []
    for pack_tokens, chunk in ((1, 3), (64, 16), (4096, 1000)):
        policy, _, trainer = make_trainer(
            model_folder, algorithm=algorithm, pack_tokens=pack_tokens, head_chunk=chunk
        )
        batch = teach(make_batch(policy, shift=0.1), top_k=K)
        losses.append(trainer.train_step(batch, lr=1e-3).metrics["policy/loss"])
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)


def test_steps_bring_the_policy_towards_the_teacher(model_folder: Path) -> None:
    algorithm = distilling(alone=True, top_k=K, divergence="jsd")
    policy, _, trainer = make_trainer(model_folder, algorithm=algorithm)
    batch = teach(make_batch(policy), top_k=K)
    found = [
        trainer.train_step(replace(batch, step=step), lr=1e-2).metrics["teacher/divergence"]
        for step in range(1, 9)
    ]
    assert found[-1] < 0.8 * found[0]


def test_rewards_move_nothing_where_the_teacher_teaches_alone(model_folder: Path) -> None:
    trained: list[dict[str, Tensor]] = []
    for reward in (0.0, 1.0):
        policy, _, trainer = make_trainer(model_folder, algorithm=distilling(alone=True))
        batch = teach(make_batch())
        first, *others = batch.sequences
        batch = replace(batch, sequences=(replace(first, reward=reward), *others))
        trainer.train_step(batch, lr=1e-3)
        trained.append(parameters(policy))
    assert same_bits(*trained)


def test_a_step_that_is_not_taught_is_the_same_with_every_setting(model_folder: Path) -> None:
    trained: list[dict[str, Tensor]] = []
    for algorithm in (AlgorithmConfig(), distilling(alone=True, weight=9.0, top_k=K)):
        policy, _, trainer = make_trainer(model_folder, algorithm=algorithm)
        trainer.train_step(make_batch(), lr=1e-3)
        trained.append(parameters(policy))
    assert same_bits(*trained)


def test_a_sequence_without_scores_is_never_taken_for_one_with_zeros(model_folder: Path) -> None:
    _, _, trainer = make_trainer(model_folder, algorithm=distilling())
    batch = teach(make_batch())
    first, *others = batch.sequences
    assert first.teacher is not None
    short = replace(first.teacher, logprobs=first.teacher.logprobs[:-1])
    for scores in (None, short):
        lacking = replace(batch, sequences=(replace(first, teacher=scores), *others))
        with pytest.raises(ValueError, match="lacks the teacher's scores"):
            trainer.train_step(lacking, lr=1e-3)
