"""Values of specs by dotted keys, and what differs between specs."""

from typing import Any

import pytest

from flotilla_common.spec.spec_values import (
    ABSENT,
    compare_specs,
    find_value,
    format_value,
    planned_steps,
)

SPEC: dict[str, Any] = {
    "seed": 0,
    "learner": {"eval": {"sets": [{"name": "heldout"}, {"name": "greedy"}]}, "betas": [0.9, 0.95]},
    "environments": {"fleet/booking.v2": {"limit": 3}, "fleet/booking": {"v2": 4}},
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("seed", 0),
        ("learner.eval.sets.1.name", "greedy"),
        ("learner.betas", [0.9, 0.95]),
        ("environments.fleet/booking.v2.limit", 3),
        ("environments.fleet/booking", {"v2": 4}),
        ("learner.eval.sets.2.name", ABSENT),
        ("seed.more", ABSENT),
        ("see", ABSENT),
    ],
)
def test_a_key_names_a_value_through_tables_lists_and_names_with_dots(key: str, value: Any) -> None:
    assert find_value(SPEC, key) == value


@pytest.mark.parametrize(
    ("learner", "steps"),
    [
        ({"steps": 3}, 3),
        ({"steps": 3, "warm_start": {"steps": 4}}, 7),
        ({"steps": 3, "warm_start": None}, 3),
        ({"warm_start": {"steps": 4}}, None),
        ({"steps": "3"}, None),
        (None, None),
    ],
)
def test_the_steps_of_a_run_include_its_warm_start(learner: Any, steps: int | None) -> None:
    assert planned_steps({"learner": learner}) == steps


def test_specs_are_compared_with_the_first_key_by_key() -> None:
    first = {"seed": 0, "learner": {"steps": 3}, "written_by": {"commit": "a"}}
    second = {"seed": 0.0, "learner": {"steps": 3, "lora": {"rank": 8}}, "written_by": {}}
    third = {"seed": False, "learner": {"steps": 4}}
    assert compare_specs([first, second, third]) == {
        "learner.lora": [ABSENT, {"rank": 8}, ABSENT],
        "seed": [0, 0.0, False],
        "learner.steps": [3, 3, 4],
    }
    assert format_value(ABSENT) == "none"
