import random

import pytest

from flotilla_environments.api import ENV_KEYS, open_instance
from flotilla_environments.reference_policies import play_randomly, solve_task
from flotilla_environments.task_generator import SPLITS, make_data_id
from flotilla_environments.tasks import make_task
from tests.support.verifier_dialect import grade

RANDOM_EPISODES = 2100


@pytest.mark.parametrize("split", SPLITS)
def test_the_oracle_solves_every_task_of_a_split(split: str) -> None:
    for index in range(60):
        for env_key in ENV_KEYS:
            task = make_task(env_key, split, index)  # pyright: ignore[reportArgumentType]
            instance = open_instance(env_key, task["data_id"])
            solve_task(task, instance.call)
            assert grade(task["verifier_func"], instance) == 1


def test_the_oracle_names_which_id_a_lookup_did_not_show() -> None:
    task = make_task("tracker", "train", 0)
    with pytest.raises(LookupError, match="which no result has shown"):
        solve_task(task, lambda name, arguments: {"ok": True})


def test_random_calls_with_names_of_the_prompt_pass_less_than_three_percent() -> None:
    rng = random.Random(0)
    passed = 0
    for index in range(RANDOM_EPISODES // len(ENV_KEYS)):
        for env_key in ENV_KEYS:
            task = make_task(env_key, "train", index)
            instance = open_instance(env_key, make_data_id("train", index))
            play_randomly(task["prompt"], instance.tools(), instance.call, rng)
            passed += grade(task["verifier_func"], instance)
    assert passed / RANDOM_EPISODES < 0.03
