"""Differences from peers, on purpose or by accident: their result, and that of this project.

README.md lists them with the reasons.
"""

import math

import numpy as np
import pytest
import torch

from flotilla_learner.algo.advantages import ADVANTAGES
from flotilla_learner.algo.gae import whiten
from flotilla_learner.algo.kl import kl_penalty
from flotilla_learner.config.algorithm import AlgorithmConfig
from tests.parity.support import Packed, agree, case, differ, gradient_of
from tests.parity.test_advantages import episodes, grouped_episodes, outcome_advantages
from tests.parity.test_losses import CORRECTED, LOSSES, configured, ours
from tests.parity.test_terms import penalties


@pytest.mark.parametrize(
    ("peer", "name", "estimator"),
    [
        ("verl", "grpo", "grpo"),
        ("verl", "dr_grpo", "dr_grpo"),
        ("verl", "rloo", "rloo"),
        ("skyrl", "grpo", "grpo"),
        ("skyrl", "max_rl", "max_rl"),
    ],
)
def test_a_lone_attempt_has_its_reward_as_advantage_in_peers_and_none_here(
    peer: str, name: str, estimator: str
) -> None:
    theirs = case(peer, "advantage", name)
    lone = theirs.inputs["group"].index("single")
    agree(theirs.outputs["advantages"][lone], theirs.inputs["reward"][lone], tolerance=2e-6)
    assert outcome_advantages(theirs.inputs, estimator)[lone] == 0.0


@pytest.mark.parametrize(("peer", "name"), [("verl", "rloo_vectorized"), ("skyrl", "rloo")])
def test_a_lone_attempt_has_no_advantage_in_some_of_their_estimators_either(
    peer: str, name: str
) -> None:
    theirs = case(peer, "advantage", name)
    assert theirs.outputs["advantages"][theirs.inputs["group"].index("single")] == 0.0


def test_a_lone_attempt_has_its_reward_as_advantage_in_the_opo_of_verl_and_none_here() -> None:
    theirs = case("verl", "advantage", "opo_lone")
    expected = Packed(theirs.inputs).rows(theirs.outputs["advantages"])
    found = ADVANTAGES.get("opo")(grouped_episodes(theirs), AlgorithmConfig())
    for group, own, row in zip(theirs.inputs["group"], found, expected, strict=True):
        if theirs.inputs["group"].count(group) == 1:
            assert row.all() and not own.any()
        else:
            agree(own, row)


def test_a_lone_attempt_is_not_compared_with_0_in_reinforce_pp_baseline_as_in_verl() -> None:
    theirs = case("verl", "advantage", "reinforce_pp_baseline_lone")
    given = grouped_episodes(theirs)
    found = np.concatenate(ADVANTAGES.get("reinforce_pp_baseline")(given, AlgorithmConfig()))
    expected = Packed(theirs.inputs).of(theirs.outputs["advantages"])
    assert differ(found, expected)
    # verl's, whitened from what both have and the rewards of lone attempts.
    centred = [
        row + (reward if theirs.inputs["group"].count(group) == 1 else 0.0)
        for group, reward, row in zip(
            given.group_ids,
            given.rewards,
            ADVANTAGES.get("dr_grpo")(given, AlgorithmConfig()),
            strict=True,
        )
    ]
    agree(whiten(np.concatenate(centred)), expected)


def test_trl_adds_1e_4_to_a_deviation_and_this_project_1e_6() -> None:
    theirs = case("trl", "advantage", "grpo")
    found = outcome_advantages(theirs.inputs, "grpo")[:4]
    deviation = np.std(theirs.inputs["reward"][:4], ddof=1)
    assert differ(found, theirs.outputs["advantages"][:4])
    agree(found * (deviation + 1e-6) / (deviation + 1e-4), theirs.outputs["advantages"][:4])


def test_skyrl_adds_1e_6_to_the_mean_of_max_rl_and_this_project_nothing() -> None:
    theirs = case("skyrl", "advantage", "max_rl")
    pair = [place for place, group in enumerate(theirs.inputs["group"]) if group == "pair"]
    mean = np.mean([theirs.inputs["reward"][place] for place in pair])
    found = outcome_advantages(theirs.inputs, "max_rl")[pair] * mean / (mean + 1e-6)
    agree(found, [theirs.outputs["advantages"][place] for place in pair], tolerance=1e-9)


def test_with_a_negative_mean_skyrl_rewards_the_worst_and_this_project_none() -> None:
    theirs = case("skyrl", "advantage", "max_rl")
    places = [place for place, group in enumerate(theirs.inputs["group"]) if group == "negative"]
    best = max(places, key=lambda place: theirs.inputs["reward"][place])
    assert theirs.outputs["advantages"][best] < 0
    assert not outcome_advantages(theirs.inputs, "max_rl")[places].any()


def test_skyrl_loses_the_return_before_an_observation() -> None:
    theirs = case("skyrl", "advantage", "reinforce_pp")
    given, advantages = Packed(theirs.inputs), theirs.outputs["advantages"]
    # Sequence 2 earned 0.5 and has an observation between its policy tokens.
    before, *_, after = given.rows(advantages)[2]
    assert episodes(theirs).rewards[2] == 0.5
    assert differ(before, after)
    same = case("verl", "advantage", "reinforce_pp")
    before, *_, after = given.rows(same.outputs["advantages"])[2]
    agree(before, after)


@pytest.mark.parametrize(
    ("peer", "name"), [("verl", "k3"), ("verl", "k3_extremes"), ("skyrl", "k3")]
)
def test_verl_and_skyrl_stop_the_k3_of_a_token_at_10(peer: str, name: str) -> None:
    theirs = case(peer, "kl", name)
    given = Packed(theirs.inputs)
    logprobs = given["logprobs"].requires_grad_()
    found = kl_penalty(logprobs, given["reference"], "k3")
    slopes = gradient_of(found, logprobs)
    value, gradient = (given.of(theirs.outputs[name]) for name in ("value", "gradient"))
    free = found.detach() < 10
    agree(found.detach()[free], value[free])
    agree(slopes[free], gradient[free])
    assert not free.all()
    assert (value[~free] == 10).all()
    assert not gradient[~free].any()
    held = (given["logprobs"] - given["reference"]).abs() > 20
    assert (slopes[~free & ~held].abs() > 0.9).all()


def test_a_log_ratio_of_a_k3_is_held_within_20_here_and_not_at_all_in_trl() -> None:
    theirs = case("trl", "kl", "k3_extremes")
    given = Packed(theirs.inputs)
    logprobs = given["logprobs"].requires_grad_()
    found = kl_penalty(logprobs, given["reference"], "k3")
    slopes = gradient_of(found, logprobs) / len(logprobs)
    gradient = given.of(theirs.outputs["gradient"])
    far = (given["logprobs"] - given["reference"]).abs() > 20
    agree(slopes[~far], gradient[~far])
    assert not slopes[far].any()
    assert gradient[far].abs().max() > math.exp(22)


def test_trl_multiplies_its_k3_by_the_ratio_by_default() -> None:
    theirs = case("trl", "kl", "k3_bias_corrected")
    given = Packed(theirs.inputs)
    logprobs = given["logprobs"].requires_grad_()
    estimate = kl_penalty(logprobs, given["reference"], "k3")
    corrected = (estimate * (logprobs - given["old"]).exp()).mean()
    agree(corrected.detach(), theirs.outputs["value"])
    agree(gradient_of(corrected, logprobs), given.of(theirs.outputs["gradient"]))
    assert differ(estimate.detach().mean(), theirs.outputs["value"])


def test_a_log_ratio_of_the_loss_is_held_within_20_here_and_not_at_all_in_trl() -> None:
    theirs = case("trl", "loss", "ppo_clip_extremes")
    given = Packed(theirs.inputs)
    _, found = ours(configured(LOSSES["ppo_clip_higher"]), theirs.inputs)
    gradient = given.of(theirs.outputs["gradient"])
    far = (given["logprobs"] - given["old"]).abs() > 20
    agree(found[~far], gradient[~far])
    assert not found[far].any()
    assert gradient[far].abs().max() > math.exp(22)


def test_a_token_with_its_own_advantage_moves_its_whole_sequence_in_the_gspo_of_trl() -> None:
    theirs = case("trl", "loss", "gspo_by_token")
    given = Packed(theirs.inputs)
    gradient = given.of(theirs.outputs["gradient"])
    _, found = ours(configured(LOSSES["gspo_by_token"]), theirs.inputs)
    assert differ(found, gradient)
    for row in range(given.count):
        own = given.sequence == row
        # GSPO's own form has one gradient a sequence, the mean of what GSPO-token gives its tokens.
        agree(found[own].mean().expand(int(own.sum())), gradient[own])


def test_the_ratio_of_a_sequence_ends_at_e_10_in_verl_and_at_e_20_here() -> None:
    theirs = case("verl", "loss", "gspo_far")
    gradient = Packed(theirs.inputs).of(theirs.outputs["gradient"])
    _, found = ours(configured(LOSSES["gspo"]), theirs.inputs)
    # Sequence 0 has a mean log-ratio of 12, an advantage of -1.5 and 1/8 of the weight a token.
    agree(found[:4], torch.full((4,), 1.5 * math.exp(12) / 8))
    assert not gradient[:4].any()
    agree(theirs.outputs["value"], 1.5 * math.exp(10) / 2)


def test_verl_divides_by_the_tokens_that_a_mask_left_and_this_project_by_all() -> None:
    theirs = case("verl", "correction", "decoupled_token_tis_masks_kept_mean")
    whole = case("verl", "correction", "decoupled_token_tis_masks")
    loss, gradient = ours(configured(CORRECTED["decoupled_token_tis_masks"]), theirs.inputs)
    share = whole.outputs["value"] / theirs.outputs["value"]
    assert 0.3 < share < 0.9
    agree(loss, share * theirs.outputs["value"])
    agree(gradient, share * Packed(theirs.inputs).of(theirs.outputs["gradient"]))


def test_a_mean_of_each_micro_batch_is_another_loss() -> None:
    theirs = case("trl", "loss", "ppo_clip_parts_local_mean")
    loss, _ = ours(configured(LOSSES["ppo_clip_higher"]), theirs.inputs)
    assert differ(loss, theirs.outputs["value"])


def test_beyond_the_limit_the_penalty_ends_at_minus_1_here_and_not_in_verl() -> None:
    theirs = case("verl", "overlong", "soft_beyond")
    found = penalties(theirs)
    agree(found, np.maximum(theirs.outputs["penalties"], -1.0))
    assert min(theirs.outputs["penalties"]) == -1.5
