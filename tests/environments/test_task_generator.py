"""Scenarios: the data that an id draws, and the names that it never does."""

import subprocess
import sys

import pytest

from flotilla_environments.api import ENV_KEYS
from flotilla_environments.name_lists import LISTS, split_pool
from flotilla_environments.task_generator import Split, draw_scenario, make_data_id

NOVEL = {word for words in LISTS.values() for word in split_pool(words)[1]}


def test_ids_are_drawn_again_for_every_task() -> None:
    ids = {draw_scenario("shop", f"train-{index:06d}").targets["item_id"] for index in range(400)}
    assert len(ids) > 80  # of the 90 numbers of two digits


def test_a_scenario_is_the_same_in_every_process() -> None:
    program = (
        "from flotilla_environments.task_generator import *\n"
        "print([draw_scenario(k, 'heldout-000007') for k in APPS])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
        env={"PYTHONPATH": ".", "PYTHONHASHSEED": "7"},
    ).stdout
    assert printed.strip() == str([draw_scenario(key, "heldout-000007") for key in ENV_KEYS])


def pairs(env_key: str, split: Split, count: int = 1500) -> set[tuple[str, str]]:
    return {draw_scenario(env_key, make_data_id(split, index)).pair for index in range(count)}


@pytest.mark.parametrize("env_key", ENV_KEYS)
def test_no_evaluation_pair_is_ever_trained_on_or_demonstrated(env_key: str) -> None:
    seen = pairs(env_key, "train") | pairs(env_key, "demo")
    assert not seen & pairs(env_key, "heldout")
    assert not seen & pairs(env_key, "unseen_names")
    assert len(pairs(env_key, "unseen_names")) >= 24
    assert len(pairs(env_key, "heldout")) >= 60


@pytest.mark.parametrize("env_key", ENV_KEYS)
def test_unseen_names_are_in_no_training_task(env_key: str) -> None:
    for index in range(300):
        unseen = draw_scenario(env_key, make_data_id("unseen_names", index))
        assert set(unseen.pair) <= NOVEL
        for split in ("train", "heldout"):
            words = str(draw_scenario(env_key, make_data_id(split, index)).tables).split("'")
            assert not set(words) & NOVEL
