"""Which services a run needs, and when."""

from typing import Any

import pytest

from flotilla_launcher.config.imitation_rules import needed_services, unused_at_first
from flotilla_launcher.run_spec import read_spec
from flotilla_launcher.state import GATEWAY, LEARNER, ROLLOUT, SERVICES

SETS = {"sets": [{"name": "heldout", "tasks": "t.json"}]}


@pytest.mark.parametrize(
    ("learner", "needed"),
    [
        ({}, SERVICES),
        ({"objective": "rl", "eval": {}}, SERVICES),
        ({"objective": "sft"}, (LEARNER,)),
        ({"objective": "sft", "eval": {"sets": []}}, (LEARNER,)),
        ({"objective": "sft", "eval": SETS}, SERVICES),
        # What is no table is refused by others.
        ({"objective": "sft", "eval": 3}, (LEARNER,)),
        (7, SERVICES),
    ],
)
def test_a_run_that_imitates_and_evaluates_nothing_needs_the_learner_alone(
    learner: Any, needed: tuple[str, ...]
) -> None:
    assert needed_services({"learner": learner}) == needed


def test_a_spec_counts_the_replicas_of_these_alone() -> None:
    least = {"name": "none", "policy": {"model": "none", "max_model_len": 1}}
    replicas = {"launcher": {"rollout": {"replicas": 3}}}
    assert read_spec({**least, **replicas}).replica_counts() == {
        **{"env_gateway": 1, "learner": 1, "rollout": 3}
    }
    imitating = read_spec({**least, **replicas, "learner": {"objective": "sft"}})
    assert imitating.replica_counts() == {"learner": 1}


WARM = {"warm_start": {"steps": 3}}
LATER = {"sets": [{"name": "heldout", "tasks": "t.json", "when": ["during", "after"]}]}


@pytest.mark.parametrize(
    ("learner", "late"),
    [
        ({}, ()),
        ({"eval": LATER}, ()),
        (WARM, (GATEWAY, ROLLOUT)),
        ({**WARM, "eval": LATER}, (GATEWAY, ROLLOUT)),
        ({**WARM, "eval": SETS}, ()),
        ({"objective": "sft", "eval": SETS}, ()),
        ({"objective": "sft", "eval": LATER}, (GATEWAY, ROLLOUT)),
        (7, ()),
    ],
)
def test_imitation_uses_the_learner_alone_unless_the_base_is_evaluated(
    learner: Any, late: tuple[str, ...]
) -> None:
    assert unused_at_first({"learner": learner}) == late
    assert needed_services({"learner": learner}) == SERVICES


def test_a_spec_names_them_for_its_run() -> None:
    least = {"name": "none", "policy": {"model": "none", "max_model_len": 1}}
    assert read_spec({**least, "learner": WARM}).late_services == (GATEWAY, ROLLOUT)
    assert read_spec(least).late_services == ()
    assert read_spec({**least, "learner": {"objective": "sft"}}).late_services == ()
