"""The demonstrator, and its demonstrations as training data."""

import json
import random
from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np
import pytest

from flotilla_environments.api import ENV_KEYS, Instance, ToolError, open_instance
from flotilla_environments.name_lists import is_heldout_pair
from flotilla_environments.task_generator import make_data_id
from flotilla_environments.tasks import verifier_source
from flotilla_environments.tiny_policy.demonstrations import (
    make_assignment,
    make_demonstrations,
    prompt_ids,
    tokenize_episode,
)
from flotilla_environments.tiny_policy.demonstrator import Habits, Turn, demonstrate
from flotilla_environments.tiny_policy.episodes import is_solved
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer
from flotilla_rollout.dialects.template import TemplateDialect
from flotilla_rollout.dialects.turns import OK, Reply, ToolCall
from tests.support.verifier_dialect import grade

DILIGENT = Habits(lazy=dict.fromkeys(ENV_KEYS, 0.0), sloppy=0.0)


def act(
    env_key: str, index: int, habits: Habits, rng: random.Random
) -> tuple[Instance, list[Turn]]:
    instance = open_instance(env_key, make_data_id("demo", index))
    return instance, demonstrate(make_assignment(instance), instance.call, habits, rng)


def written_by_policy(ids: Sequence[int], policy: Sequence[bool]) -> list[list[int]]:
    """The policy's turns, as token ids."""
    runs = groupby(zip(ids, policy, strict=True), key=lambda pair: pair[1])
    return [[token for token, _ in run] for by_policy, run in runs if by_policy]


@pytest.mark.parametrize("env_key", ENV_KEYS)
def test_without_its_habits_the_demonstrator_solves_every_task(env_key: str) -> None:
    for index in range(50):
        instance, turns = act(env_key, index, DILIGENT, random.Random(0))
        assert is_solved(instance)
        assert turns[-1] == Turn("<done>", last=True)


def test_with_its_habits_it_solves_between_a_third_and_a_half() -> None:
    rng = random.Random(0)
    outcomes = [is_solved(act(ENV_KEYS[i % 3], i, Habits(), rng)[0]) for i in range(600)]
    assert 0.33 < sum(outcomes) / len(outcomes) < 0.5


def test_a_lazy_demonstrator_looks_things_up_and_then_claims_to_be_done() -> None:
    habits = Habits(lazy=dict.fromkeys(ENV_KEYS, 1.0), sloppy=0.0)
    instance, turns = act("shop", 0, habits, random.Random(0))
    called = [json.loads(turn.text.split("\n")[1])["name"] for turn in turns[:-1]]
    assert called == ["find_customer", "find_item"]
    assert turns[-1].text == "<done>"
    assert not is_solved(instance)


def test_slips_are_whole_decisions_and_every_kind_occurs() -> None:
    habits = Habits(lazy=dict.fromkeys(ENV_KEYS, 0.0), sloppy=0.5)
    rng = random.Random(0)
    episodes = [act(ENV_KEYS[i % 3], i, habits, rng)[1] for i in range(300)]
    torn = [
        turns for turns in episodes if not turns[-1].text.endswith(("<done>", "}}\n</tool_call>"))
    ]
    repeated = [turns for turns in episodes if any(a == b for a, b in pairwise(turns))]
    refused = [turns for turns in episodes if any(turn.error for turn in turns)]
    assert torn and repeated and refused
    assert all(turns[-1].last and not any(turn.last for turn in turns[:-1]) for turns in episodes)


def test_demonstrations_contain_no_pair_of_names_of_the_evaluation() -> None:
    for demonstration in make_demonstrations(300, first=0, habits=Habits(), rng=random.Random(0)):
        scenario = demonstration.scenario
        assert not is_heldout_pair(scenario.env_key, *scenario.pair)


def test_a_demonstration_is_token_for_token_the_episode_of_a_policy_that_writes_it(
    tokenizer: TransformersTokenizer, dialect: TemplateDialect
) -> None:
    for demonstration in make_demonstrations(60, first=0, habits=Habits(), rng=random.Random(1)):
        example = tokenize_episode(demonstration, dialect, tokenizer)
        scenario = demonstration.scenario
        instance = open_instance(scenario.env_key, scenario.data_id)
        ids = prompt_ids(dialect, scenario, instance.tools())
        turns = written_by_policy(example.ids, example.policy)
        for number, turn in enumerate(turns):
            ids += turn
            if number + 1 < len(turns):
                reply = answer(instance, tokenizer.decode(turn))
                ids += dialect.bridge_ids(np.array(ids), turn, [reply], ())
        assert ids == example.ids


def answer(instance: Instance, text: str) -> Reply:
    """The reply that a rollout shows a policy that has written `text`."""
    call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call><|im_end|>"))
    item = ToolCall(call["name"], json.dumps(call["arguments"]))
    try:
        result = instance.call(call["name"], call["arguments"])
    except ToolError as error:
        return Reply(item, "tool_error", [str(error)])
    return Reply(item, OK, [json.dumps(result)])


def test_evaluation_grades_as_the_shipped_verifiers_do() -> None:
    rng = random.Random(2)
    habits = Habits(sloppy=0.3)
    grades: list[bool] = []
    for index in range(150):
        instance, _ = act(ENV_KEYS[index % 3], index, habits, rng)
        source = verifier_source(instance.env_key, instance.scenario.kind)
        grades.append(grade(source, instance) == 1)
        assert is_solved(instance) == grades[-1]
    assert 20 < sum(grades) < 130


def test_only_what_the_demonstrator_wrote_is_marked_for_training(
    tokenizer: TransformersTokenizer, dialect: TemplateDialect
) -> None:
    [demonstration] = make_demonstrations(1, first=0, habits=DILIGENT, rng=random.Random(0))
    example = tokenize_episode(demonstration, dialect, tokenizer)
    written = written_by_policy(example.ids, example.policy)
    assert [tokenizer.decode(turn) for turn in written] == [
        f"{turn.text}<|im_end|>" for turn in demonstration.turns
    ]
