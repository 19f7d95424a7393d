"""A spec with a judge asks for nothing that a judge cannot do, and agrees with its tasks."""

from typing import Any

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_learner.config.judge import check_judged_tasks, judged_environments
from tests.learner.config.test_teacher import read, refused

URL = "http://10.0.0.7:8000/v1"
JUDGE = {"url": f"{URL}/", "model": "m", "max_calls": 10}
JUDGED = frozenset({"notes"})


def test_url_model_and_budget_are_enough() -> None:
    judge = read(judge=JUDGE).judge
    assert judge is not None and judge.url == URL
    assert (judge.tries, judge.instructions) == (3, None)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"url": "10.0.0.7"}, "expected the URL of an endpoint"),
        ({"max_calls": 0}, "learner.judge.max_calls"),
        ({"model": ""}, "learner.judge.model"),
        ({"api_key": "sk-0123456789"}, "has no place in a spec"),
        ({"temperature": 1.0}, "learner.judge.temperature"),
    ],
)
def test_a_wrong_key_is_named(change: dict[str, Any], match: str) -> None:
    refused(match, judge={**JUDGE, **change})


@pytest.mark.parametrize("key", ["url", "model", "max_calls"])
def test_a_missing_key_is_named(key: str) -> None:
    left = {name: value for name, value in JUDGE.items() if name != key}
    refused(f"learner.judge.{key}", judge=left)


def test_what_a_score_cannot_teach_is_refused() -> None:
    named = {"advantage": "gdpo", "rewards": {"style": 1.0}}
    refused("a judge gives one score", judge=JUDGE, algorithm=named)
    refused("is shown no pictures", judge=JUDGE, policy={"vision": {}})
    alone = {"distillation": {"alone": True}}
    refused("one of the two", judge=JUDGE, teacher={"url": URL}, algorithm=alone)


def test_judged_environments_are_those_of_the_gateways_section() -> None:
    table = {"notes": {"grading": "judge"}, "booking": {"grading": "verifier"}, "shop": {}}
    assert judged_environments({"env_gateway": {"environments": table}}) == JUDGED
    assert judged_environments({}) == judged_environments({"env_gateway": {}}) == frozenset()


def test_a_judge_and_its_tasks_are_taken() -> None:
    check_judged_tasks(read(judge=JUDGE), JUDGED, ["notes", "booking"], {"heldout": ["booking"]})
    check_judged_tasks(read(), JUDGED, ["booking"], {})


def test_tasks_that_nobody_would_judge_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"environments\.notes\.grading.*add \[learner\.judge\]"):
        check_judged_tasks(read(), JUDGED, ["notes"], {})


def test_a_judge_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"leave \[learner\.judge\] out"):
        check_judged_tasks(read(judge=JUDGE), JUDGED, ["booking"], {})


def test_an_evaluation_of_judged_tasks_is_refused() -> None:
    with pytest.raises(ConfigError, match="'heldout' has tasks of 'notes', which is judged"):
        check_judged_tasks(read(judge=JUDGE), JUDGED, ["notes"], {"heldout": ["notes"]})
