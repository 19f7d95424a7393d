"""Estimators of advantages: within groups, over the batch, and with a critic."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_learner.algo.advantages import ADVANTAGES, BatchRewards, critic_targets
from flotilla_learner.config.algorithm import AlgorithmConfig
from tests.parity.fixtures import Case
from tests.parity.support import Packed, agree, chosen, each

# Names of the fixtures' cases to estimators. Groups that are not compared are in test_differences.
OUTCOMES: Mapping[str, str] = {
    "grpo": "grpo",
    "dr_grpo": "dr_grpo",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "max_rl_unfloored": "max_rl",
}
TOKENS: Mapping[str, str] = {
    "reinforce_pp": "reinforce_pp",
    "reinforce_pp_kl_in_reward": "reinforce_pp",
    "gae": "gae",
    "gae_undiscounted": "gae",
    "gae_kl_in_reward": "gae",
}
# Of rewards by name.
NAMED: Mapping[str, str] = {"gdpo": "gdpo"}
# Of groups of attempts with several tokens each.
GROUPED: Mapping[str, str] = {
    "opo": "opo",
    "reinforce_pp_baseline": "reinforce_pp_baseline",
}


def outcome_advantages(inputs: Mapping[str, Any], estimator: str) -> NDArray[np.float64]:
    """One of each attempt, each of one token."""
    groups, rewards = inputs["group"], inputs["reward"]
    seen: dict[str, int] = {}
    attempts: list[int] = []
    for group in groups:
        attempts.append(seen.setdefault(group, 0))
        seen[group] += 1
    batch = BatchRewards(groups, attempts, rewards, [np.zeros(1)] * len(groups))
    found = ADVANTAGES.get(estimator)(batch, AlgorithmConfig(advantage=estimator))
    return np.concatenate(found)


def episodes(case: Case) -> BatchRewards:
    """Every sequence an attempt of its own group."""
    given = Packed(case.inputs)
    outcomes = [float(row.sum()) for row in given.rows(case.inputs["rewards"])]
    sign = -1.0 if case.name.endswith("kl_in_reward") else 0.0
    return BatchRewards(
        [str(place) for place in range(given.count)],
        [0] * given.count,
        outcomes,
        [sign * row for row in given.rows(case.inputs["penalties"])],
        given.rows(case.inputs["values"]),
    )


def grouped_episodes(case: Case) -> BatchRewards:
    """Every sequence an attempt of the group that it is in."""
    given = Packed(case.inputs)
    outcomes = [float(row.sum()) for row in given.rows(case.inputs["rewards"])]
    nothing = [np.zeros(length) for length in given.lengths]
    return BatchRewards(case.inputs["group"], range(given.count), outcomes, nothing)


def configured(case: Case) -> AlgorithmConfig:
    discounts = {"gamma": "discount", "lam": "trace_decay"}
    critic = {discounts[name]: value for name, value in case.settings.items() if name in discounts}
    return AlgorithmConfig.model_validate({"advantage": TOKENS[case.name], "critic": critic})


@each(chosen("advantage", OUTCOMES, but=[("trl", "grpo")]))
def test_an_outcome_estimator_is_the_peers(case: Case) -> None:
    left_out = ("single", "negative") if "max_rl" in case.name else ("single",)
    compared = np.array([group not in left_out for group in case.inputs["group"]])
    found = outcome_advantages(case.inputs, OUTCOMES[case.name])
    agree(found[compared], np.array(case.outputs["advantages"])[compared])


@each(chosen("advantage", TOKENS, but=[("skyrl", "reinforce_pp")]))
def test_an_estimator_of_tokens_is_the_peers(case: Case) -> None:
    config = configured(case)
    found = ADVANTAGES.get(config.advantage)(episodes(case), config)
    agree(np.concatenate(found), Packed(case.inputs).of(case.outputs["advantages"]))


@each(chosen("advantage", GROUPED))
def test_an_estimator_of_groups_and_lengths_is_the_peers(case: Case) -> None:
    found = ADVANTAGES.get(GROUPED[case.name])(grouped_episodes(case), AlgorithmConfig())
    agree(np.concatenate(found), Packed(case.inputs).of(case.outputs["advantages"]))


@each(chosen("advantage", NAMED))
def test_an_estimator_of_named_rewards_is_the_peers(case: Case) -> None:
    given, weights = Packed(case.inputs), case.settings["weights"]
    config = AlgorithmConfig(advantage=NAMED[case.name], rewards=weights)
    columns = zip(*(case.inputs[name] for name in weights), strict=True)
    batch = BatchRewards(
        case.inputs["group"],
        range(given.count),
        [0.0] * given.count,
        [np.zeros(length) for length in given.lengths],
        named_rewards=[dict(zip(weights, column, strict=True)) for column in columns],
    )
    found = ADVANTAGES.get(config.advantage)(batch, config)
    agree(np.concatenate(found), given.of(case.outputs["advantages"]))


@each(chosen("advantage", [name for name, estimator in TOKENS.items() if estimator == "gae"]))
def test_what_the_critic_learns_is_the_peers(case: Case) -> None:
    found = critic_targets(episodes(case), configured(case))
    agree(np.concatenate(found), Packed(case.inputs).of(case.outputs["returns"]))
