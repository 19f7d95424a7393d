import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_learner.algo.advantages import ADVANTAGES
from flotilla_learner.algo.losses import LOSSES
from flotilla_learner.config.algorithm import ADVANTAGE_NAMES, LOSS_NAMES, AlgorithmConfig
from flotilla_learner.config.learner import LearnerConfig
from tests.support.repository import ROOT

DOCUMENT = ROOT / "docs" / "algorithms.md"
EXAMPLES = re.findall(r"```toml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def problem(**keys: object) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(AlgorithmConfig, keys, where="[learner.algorithm]")
    return str(caught.value)


def test_the_names_that_are_known_without_torch_are_those_that_are_registered() -> None:
    assert sorted(ADVANTAGE_NAMES) == list(ADVANTAGES.names)
    assert sorted(LOSS_NAMES) == list(LOSSES.names)


@pytest.mark.parametrize("name", ADVANTAGE_NAMES)
def test_every_estimator_may_be_chosen(name: str) -> None:
    rewards = {"style": 1.0} if name == "gdpo" else {}
    assert AlgorithmConfig(advantage=name, rewards=rewards).advantage == name


def test_named_rewards_and_their_estimator_need_each_other() -> None:
    rewards = {"correct": 1.0, "style": 0.5}
    assert 'rewards: advantage = "gdpo" needs the weights' in problem(advantage="gdpo")
    assert 'rewards: only advantage = "gdpo" learns' in problem(rewards=rewards)
    assert AlgorithmConfig(plugins=("mine",), advantage="mine", rewards=rewards).rewards == rewards
    assert "rewards" in problem(advantage="gdpo", rewards={"": 1.0})
    assert "rewards" in problem(advantage="gdpo", rewards={"style": float("nan")})


@pytest.mark.parametrize(
    "more",
    [
        {"kl": {"coefficient": 0.1, "place": "reward"}},
        {"overlong": {"soft_limit": 10, "soft_buffer": 5}},
    ],
    ids=str,
)
def test_what_changes_the_reward_alone_does_not_go_with_named_rewards(more: dict[str, Any]) -> None:
    assert "neither kl.place" in problem(advantage="gdpo", rewards={"style": 1.0}, **more)


@pytest.mark.parametrize(
    ("advantage", "choice"),
    [("mt_grpo", "drop"), ("mt_grpo", "replace"), ("gdpo", "drop"), ("gdpo", "replace")],
)
def test_groups_are_not_left_out_for_equal_rewards_if_more_is_learned_from(
    advantage: str, choice: str
) -> None:
    least = {"tasks": "t", "steps": 1, "groups_per_step": 1, "group_size": 2}
    algorithm = {"advantage": advantage, "rewards": {"style": 1.0} if advantage == "gdpo" else {}}
    given = {**least, "constant_groups": choice, "algorithm": algorithm}
    with pytest.raises(ConfigError, match=rf'"{advantage}" learns from; set it to "mask"'):
        parse_config(LearnerConfig, given, where="spec")
    parse_config(LearnerConfig, {**given, "constant_groups": "mask"}, where="spec")
    parse_config(LearnerConfig, {**given, "algorithm": {"advantage": "grpo"}}, where="spec")


def test_an_unknown_name_is_refused_with_the_one_that_was_meant() -> None:
    assert "loss: unknown loss; did you mean 'ppo_clip'?" in problem(loss="ppo_clp")
    assert "advantage: unknown advantage; did you mean 'grpo'?" in problem(advantage="gpro")
    assert "known: cispo, clip_cov, dppo, dppo_kl, dual_clip" in problem(loss="x")
    assert "algorithm.plugins" in problem(loss="x")


def test_with_a_plugin_any_name_may_be_known() -> None:
    assert AlgorithmConfig(plugins=("mine",), loss="my_loss", advantage="my_advantage")


@pytest.mark.parametrize("key", ["token_tis", "sequence_tis"])
def test_samples_are_not_corrected_twice(key: str) -> None:
    assert 'set proximal = "trainer"' in problem(correction={key: 2.0})
    AlgorithmConfig.model_validate({"correction": {key: 2.0}, "proximal": "trainer"})


def test_bounds_of_a_covariance_are_in_order() -> None:
    assert "high: expected more than low, which is 6" in problem(clip_cov={"low": 6.0})


def test_reading_the_configuration_imports_no_torch() -> None:
    program = "import sys, flotilla_learner.config.learner; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_of_the_document_is_valid(example: str) -> None:
    parse_config(AlgorithmConfig, tomllib.loads(example)["learner"]["algorithm"], where="example")


def test_the_first_example_of_the_document_has_the_defaults() -> None:
    shown = tomllib.loads(EXAMPLES[0])["learner"]["algorithm"]
    assert AlgorithmConfig.model_validate(shown) == AlgorithmConfig()
