"""Every key of [learner.algorithm] that shapes the loss has the effect that it promises."""

from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch

from flotilla_learner.algo.advantages import ADVANTAGES
from flotilla_learner.algo.losses import LOSSES
from flotilla_learner.config.algorithm import ADVANTAGE_NAMES, LOSS_NAMES, AlgorithmConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.trainer import Trainer
from flotilla_learner.types import TrainBatch, TrainSequence, TurnTokens
from tests.support.rank_configs import policy_config
from tests.support.tiny_ranks import (
    changed,
    make_batch,
    make_trainer,
    only,
    parameters,
    same_bits,
    train,
)


@pytest.fixture(scope="module")
def initial(model_folder: Path) -> Policy:
    return load_policy(policy_config(model_folder), RankConfig())


@pytest.fixture
def batch(initial: Policy) -> TrainBatch:
    """Its verifiers return by name whether an attempt passed, and its place in the group."""
    made = make_batch(initial)
    named = [{"passed": s.reward, "place": float(s.attempt_index)} for s in made.sequences]
    pairs = zip(made.sequences, named, strict=True)
    return replace(made, sequences=tuple(replace(s, named_rewards=own) for s, own in pairs))


def named(key: str, name: str, **rewards: float) -> dict[str, Any]:
    """One key of an algorithm, with the weights of named rewards if it needs any."""
    return {**only(key, name), **({"rewards": rewards} if name == "gdpo" else {})}


def better(batch: TrainBatch) -> list[TrainSequence]:
    return [s for s in batch.sequences if s.reward == 1.0]


def worse(batch: TrainBatch) -> list[TrainSequence]:
    return [s for s in batch.sequences if s.reward == 0.0]


def moved(batch: TrainBatch, up: float, down: float) -> TrainBatch:
    """Return the batch as if the sampler had found better (worse) attempts so much less (more)
    likely: their log ratios are `up` and `down`."""

    def shifted(s: TrainSequence) -> TrainSequence:
        shift = up if s.reward else down
        return replace(s, behaviour_logprobs=s.behaviour_logprobs - shift * s.policy_mask)

    return replace(batch, sequences=tuple(shifted(s) for s in batch.sequences))


def with_turns(batch: TrainBatch) -> TrainBatch:
    """Return the batch as if the environment had rewarded the first of each attempt's turns."""

    def rewarded(s: TrainSequence) -> TrainSequence:
        tokens = int(s.policy_mask.sum())
        first = TurnTokens(0, 3, float(s.attempt_index))
        return replace(s, turns=(first, TurnTokens(1, tokens - 3, None)))

    return replace(batch, sequences=tuple(rewarded(s) for s in batch.sequences))


@pytest.mark.parametrize("advantage", ADVANTAGE_NAMES)
def test_every_advantage_makes_better_attempts_likelier_and_worse_ones_less(
    model_folder: Path, initial: Policy, batch: TrainBatch, advantage: str
) -> None:
    step = train(model_folder, batch, **named("advantage", advantage, passed=1.0))
    assert step.gain(initial, better(batch)) > 0 > step.gain(initial, worse(batch))


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_every_loss_makes_better_attempts_likelier_and_worse_ones_less(
    model_folder: Path, initial: Policy, batch: TrainBatch, loss: str
) -> None:
    step = train(model_folder, batch, loss=loss)
    assert step.gain(initial, better(batch)) > 0 > step.gain(initial, worse(batch))


@pytest.mark.parametrize(
    ("key", "names", "shift"), [("advantage", ADVANTAGE_NAMES, 0.0), ("loss", LOSS_NAMES, 0.4)]
)
def test_no_two_names_mean_the_same(
    model_folder: Path, batch: TrainBatch, key: str, names: tuple[str, ...], shift: float
) -> None:
    # In the first step the critic knows nothing, and gae is reinforce_pp.
    critic = {"lr": 0.01}
    # No token here is likely enough for its probability to move by the defaults of dppo's clips.
    # Nor are covariances as high as clip_cov's.
    clips = {"clip_low": 0.02, "clip_high": 0.03, "clip_cov": {"share": 0.5, "low": -1.0}}
    given = with_turns(moved(batch, shift, 4 * shift))
    weights = {"passed": 1.0, "place": 0.5}
    found = [
        train(model_folder, given, steps=2, critic=critic, **clips, **named(key, name, **weights))
        for name in names
    ]
    norms = [round(step.metrics["policy/grad_norm"], 6) for step in found]
    assert len(set(norms)) == len(names)


def test_a_turn_that_the_environment_rewarded_becomes_likelier_than_in_grpo(
    model_folder: Path, batch: TrainBatch
) -> None:
    """Where all attempts pass, the rewards of turns are all that moves the policy."""
    passed = changed(with_turns(batch), reward=1.0)
    assert train(model_folder, passed, advantage="grpo").metrics["policy/updates"] == 0.0
    step = train(model_folder, passed, advantage="mt_grpo")
    assert step.metrics["policy/updates"] == 1.0
    tokens = step.result.tokens
    assert tokens is not None
    for sequence, advantages in zip(passed.sequences, tokens.advantages, strict=True):
        assert np.sign(advantages[:3]).tolist() == [np.sign(sequence.attempt_index - 1.5)] * 3
        assert not advantages[3:].any()


def test_clip_cov_holds_the_same_tokens_in_packs_of_any_size(
    model_folder: Path, batch: TrainBatch
) -> None:
    chosen = {"loss": "clip_cov", "clip_cov": {"share": 0.25, "low": -100, "high": 100}}
    algorithm = AlgorithmConfig.model_validate(chosen)
    outcomes: list[tuple[float, dict[str, torch.Tensor]]] = []
    for pack_tokens in (1, 4096):
        # Adam divides a gradient by its own size, rounding errors too; not with this.
        policy, _, trainer = make_trainer(
            model_folder, pack_tokens=pack_tokens, algorithm=algorithm, eps=1.0
        )
        metrics = trainer.train_step(batch, lr=0.1).metrics
        outcomes.append((metrics["policy/clip_ratio"], parameters(policy)))
    # A share of all tokens, of which some have no gradient anyway.
    assert outcomes[0][0] == outcomes[1][0] == pytest.approx(0.25, abs=0.1)
    for name, value in outcomes[0][1].items():
        torch.testing.assert_close(value, outcomes[1][1][name], rtol=0, atol=1e-6)


def test_a_share_of_1_of_all_covariances_leaves_nothing_to_train(
    model_folder: Path, batch: TrainBatch
) -> None:
    held = {"share": 1.0, "low": -100, "high": 100}
    metrics = train(model_folder, batch, loss="clip_cov", clip_cov=held).metrics
    assert metrics["policy/clip_ratio"] == 1.0
    assert metrics["policy/grad_norm"] == 0.0


def test_a_plugin_brings_an_advantage_and_a_loss(
    model_folder: Path,
    initial: Policy,
    batch: TrainBatch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = """
        import numpy as np
        from flotilla_learner.algo.advantages import ADVANTAGES
        from flotilla_learner.algo.losses import LOSSES, TokenLoss

        @ADVANTAGES.register("contrary")
        def contrary(batch, config):
            return [np.full(len(t), -r) for r, t in zip(batch.rewards, batch.token_rewards)]

        @LOSSES.register("likelihood")
        def likelihood(tokens, config):
            return TokenLoss(-tokens.advantages * tokens.logprobs, tokens.logprobs > 0)
    """
    (tmp_path / "contrary_plugin.py").write_text(dedent(module))
    monkeypatch.syspath_prepend(tmp_path)
    for registry in (ADVANTAGES, LOSSES):
        # What the plugin registers is gone after this test.
        monkeypatch.setattr(registry, "_entries", dict(vars(registry)["_entries"]))
    chosen: dict[str, Any] = {
        "plugins": ["contrary_plugin"],
        "advantage": "contrary",
        "loss": "likelihood",
    }
    step = train(model_folder, batch, **chosen)
    assert step.gain(initial, better(batch)) < 0


def test_unregistered_names_are_refused_as_the_trainer_is_made(
    model_folder: Path,
) -> None:
    with pytest.raises(ValueError, match="'no_such_plugin' cannot be imported"):
        train(model_folder, make_batch(), plugins=["no_such_plugin"])
    with pytest.raises(ValueError, match=r"unknown .*'grop'.*did you mean 'grpo'"):
        train(model_folder, make_batch(), plugins=["json"], advantage="grop")


@pytest.mark.parametrize(
    ("key", "loss", "narrow", "wide", "ratios"),
    [
        ("clip_high", "ppo_clip", 0.28, 0.6, (0.4, 0.0)),
        ("clip_low", "ppo_clip", 0.2, 0.5, (0.0, -0.4)),
        ("dual_clip", "dual_clip", 3.0, 6.0, (0.0, 1.5)),
        ("clip_high", "cispo", 0.28, 0.6, (0.4, 0.0)),
    ],
)
def test_within_wider_bounds_a_sample_that_is_off_moves_the_policy_more(
    model_folder: Path,
    batch: TrainBatch,
    key: str,
    loss: str,
    narrow: float,
    wide: float,
    ratios: tuple[float, float],
) -> None:
    off = moved(batch, *ratios)
    cut, free = (train(model_folder, off, loss=loss, **only(key, v)) for v in (narrow, wide))
    assert cut.metrics["policy/clip_ratio"] > free.metrics["policy/clip_ratio"]
    assert cut.metrics["policy/grad_norm"] < free.metrics["policy/grad_norm"]


@pytest.mark.parametrize(
    ("key", "ratios"), [("sapo_positive", (0.5, 0.0)), ("sapo_negative", (0.0, 0.5))]
)
def test_a_sharper_gate_of_sapo_closes_sooner(
    model_folder: Path, batch: TrainBatch, key: str, ratios: tuple[float, float]
) -> None:
    off = moved(batch, *ratios)
    soft, sharp = (train(model_folder, off, loss="sapo", **only(key, tau)) for tau in (1.0, 8.0))
    assert sharp.metrics["policy/grad_norm"] < soft.metrics["policy/grad_norm"]


def test_decoupled_ppo_clips_against_the_trainer_and_not_the_sampler(
    model_folder: Path, batch: TrainBatch
) -> None:
    off = moved(batch, 1.0, -1.0)
    held = train(model_folder, off, proximal="behaviour")
    free = train(model_folder, off, proximal="trainer")
    assert (held.metrics["policy/clip_ratio"], free.metrics["policy/clip_ratio"]) == (1.0, 0.0)
    assert held.metrics["policy/grad_norm"] == 0.0 < free.metrics["policy/grad_norm"]


def test_in_later_epochs_the_proximal_policy_is_still_that_of_the_steps_start(
    model_folder: Path, batch: TrainBatch
) -> None:
    once = train(model_folder, batch, lr=0.03, proximal="trainer")
    twice = train(model_folder, batch, lr=0.03, proximal="trainer", epochs=2)
    again = train(model_folder, batch, lr=0.03, proximal="trainer", steps=2)
    assert once.metrics["policy/clip_ratio"] == 0.0
    # A new step would begin from where the policy is now; an epoch is held by the clip.
    assert not same_bits(parameters(twice.policy), parameters(again.policy))


def naive_sequence_mean(batch: TrainBatch) -> float:
    """On policy the loss of a token is minus its advantage: grpo, written down again."""
    total = 0.0
    for group in sorted({s.group_id for s in batch.sequences}):
        rewards = torch.tensor([s.reward for s in batch.sequences if s.group_id == group])
        total -= float(((rewards - rewards.mean()) / (rewards.std() + 1e-6)).sum())
    return total / len(batch.sequences)


def test_reductions_weigh_tokens_as_they_say(model_folder: Path, batch: TrainBatch) -> None:
    by_sequence = train(model_folder, batch, reduction="sequence_mean").metrics
    assert by_sequence["policy/loss"] == pytest.approx(naive_sequence_mean(batch), abs=1e-5)
    by_token = train(model_folder, batch, reduction="token_mean").metrics
    norm: dict[str, Any] = {"reduction": "sequence_mean_token_sum_norm"}
    by_constant = train(model_folder, batch, **norm, norm_tokens=50).metrics
    tokens = sum(int(s.policy_mask.sum()) for s in batch.sequences)
    scale = tokens / (50 * len(batch.sequences))
    assert by_constant["policy/loss"] == pytest.approx(by_token["policy/loss"] * scale, rel=1e-5)
    # Without norm_tokens it is policy.max_model_len, 128 here.
    longest = train(model_folder, batch, **norm).metrics
    assert longest["policy/grad_norm"] == pytest.approx(
        by_constant["policy/grad_norm"] * 50 / 128, rel=1e-4
    )


def test_more_updates_move_the_policy_further(model_folder: Path, batch: TrainBatch) -> None:
    once = train(model_folder, batch)
    epochs = train(model_folder, batch, epochs=3)
    parts = train(model_folder, batch, mini_batches=3)
    assert [s.metrics["policy/updates"] for s in (once, epochs, parts)] == [1.0, 3.0, 3.0]
    kl = [s.metrics["policy/post_update_kl"] for s in (once, epochs)]
    assert 0 < kl[0] < kl[1]


def test_the_entropy_bonus_spreads_the_policy_and_its_reverse_sharpens_it(
    model_folder: Path, batch: TrainBatch
) -> None:
    flat, plain, sharp = (
        train(model_folder, batch, steps=3, entropy_coefficient=c).metrics["policy/entropy"]
        for c in (1.0, 0.0, -1.0)
    )
    assert flat > plain > sharp


def test_what_moves_without_advantage_moves_groups_without_a_signal_too(
    model_folder: Path, batch: TrainBatch
) -> None:
    step = train(model_folder, changed(batch, reward=1.0), entropy_coefficient=0.1)
    assert step.metrics["policy/updates"] == 1.0
    assert step.metrics["policy/grad_norm"] > 0


def test_a_missing_norm_is_named(model_folder: Path) -> None:
    policy, adamw, _ = make_trainer(model_folder)
    config = AlgorithmConfig(reduction="sequence_mean_token_sum_norm")
    with pytest.raises(ValueError, match=r"algorithm\.norm_tokens"):
        Trainer(replace(policy, max_model_len=None), adamw, config, RankConfig())


@pytest.mark.parametrize("advantage", ADVANTAGE_NAMES)
def test_an_empty_batch_is_a_step_without_an_update(model_folder: Path, advantage: str) -> None:
    kl = {"coefficient": 0.1, "place": "loss" if advantage == "gdpo" else "reward"}
    chosen = named("advantage", advantage, passed=1.0)
    step = train(model_folder, TrainBatch(1, ()), **chosen, kl=kl)
    assert (step.metrics["policy/updates"], step.result.skipped) == (0.0, False)
