"""The app of screens: what its pictures show, what a click does, and what only looking earns."""

import io
from collections import Counter
from itertools import islice
from typing import Any

import pytest
from PIL import Image

from flotilla_environments.api import ENV_KEYS, Instance, ToolError, open_instance
from flotilla_environments.reference_policies import plan_calls
from flotilla_environments.screen.app import MIXED_UP
from flotilla_environments.screen.layout import COLOURS, HEIGHT, PLACE, PLACES, WIDTH
from flotilla_environments.task_generator import Scenario, draw_scenario, make_data_id
from flotilla_environments.tasks import make_task, verifier_source
from tests.environments.screen.looking import play_by_looking, read_places, use
from tests.support.verifier_dialect import grade

CHANCE = 1 / len(PLACES)


def open_screen(index: int, version: str = "v1") -> Instance:
    return open_instance("screen", make_data_id("heldout", index), version)


def clicks(instance: Instance) -> list[tuple[Any, ...]]:
    return instance.query("current", "select screen, x, y, tile_id from clicks order by id").rows


def is_solved(instance: Instance) -> bool:
    return grade(verifier_source("screen", instance.scenario.kind), instance) == 1


def presses(count: int, version: str = "v1") -> list[Scenario]:
    """Tasks of one click."""
    ids = (make_data_id("heldout", index) for index in range(4 * count))
    drawn = (draw_scenario("screen", data_id, version) for data_id in ids)
    return list(islice((task for task in drawn if task.kind == "press"), count))


def test_a_policy_that_looks_solves_every_task() -> None:
    for index in range(200):
        instance = open_screen(index)
        play_by_looking(instance)
        assert is_solved(instance)


def test_a_policy_that_looks_at_mixed_up_pictures_is_no_better_than_a_blind_one() -> None:
    drawn = presses(1200, MIXED_UP)
    instances = [open_instance("screen", task.data_id, MIXED_UP) for task in drawn]
    for instance in instances:
        play_by_looking(instance)
    # Four standard deviations of 1,200 tosses.
    assert sum(map(is_solved, instances)) / 1200 == pytest.approx(CHANCE, abs=0.032)


def test_no_place_holds_the_tile_that_is_asked_for_more_often_than_another() -> None:
    # Whatever a policy knows but the picture: the prompt is the colour.
    places: Counter[tuple[str, int, int]] = Counter()
    for task in presses(3600):
        x, y = plan_calls(task)[0][1]["coordinate"]
        places[(str(task.slots["first"]), x // PLACE, y // PLACE)] += 1
    assert len(places) == len(COLOURS) * len(PLACES)
    # Expected are 50 of each: up to five standard deviations away.
    assert min(places.values()) > 50 - 35
    assert max(places.values()) < 50 + 35


def test_the_pictures_show_the_tiles_that_can_be_clicked() -> None:
    for index in range(100):
        instance = open_screen(index)
        rows = instance.query(
            "current", "select colour, left, top from tiles where screen = 0"
        ).rows
        shown = {name: (x // PLACE, y // PLACE) for name, (x, y) in _shown(instance).items()}
        assert shown == {name: (left // PLACE, top // PLACE) for name, left, top in rows}


def _shown(instance: Instance) -> dict[str, tuple[int, int]]:
    return read_places(use(instance, "screenshot").png)


def test_a_task_always_draws_the_same_bytes_and_another_task_draws_others() -> None:
    first, again, other = open_screen(3), open_screen(3), open_screen(4)
    assert use(first, "screenshot") == use(again, "screenshot")
    assert use(first, "screenshot") != use(other, "screenshot")
    picture = Image.open(io.BytesIO(use(first, "screenshot").png))
    assert (picture.size, picture.mode, picture.format) == ((WIDTH, HEIGHT), "RGB", "PNG")


def test_a_click_on_a_tile_leads_to_the_next_screen_and_one_beside_it_stays() -> None:
    index = next(i for i in range(50) if open_screen(i).scenario.kind == "press_two")
    instance = open_screen(index)
    first, second = plan_calls(instance.scenario)
    before = use(instance, "screenshot")
    assert use(instance, "left_click", coordinate=[WIDTH - 1, 0]) == before
    after = instance.call(*first)
    assert after != before
    assert use(instance, "screenshot") == after
    assert _shown(instance).keys() >= {str(instance.scenario.slots["second"])}
    instance.call(*second)
    assert _shown(instance) == {}, "nothing is left to click"
    assert [row[0] for row in clicks(instance)] == [0, 0, 1]
    assert clicks(instance)[0][3] is None
    assert not is_solved(instance), "a click beside the tiles is not forgiven: it would be a try"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action": "fly"}, "unknown action 'fly': use screenshot or left_click"),
        ({"action": "left_click"}, r"left_click needs coordinate: \[x, y\]"),
        ({"action": "left_click", "coordinate": [1, 2, 3]}, r"needs coordinate: \[x, y\]"),
        ({"action": "left_click", "coordinate": [1, "2"]}, "coordinate must be a list of integers"),
        ({"action": "left_click", "coordinate": [1, 2.5]}, "coordinate must be a list of integers"),
        ({"action": "left_click", "coordinate": [128, 0]}, r"\[128, 0\] is not on the 128x128"),
        ({"action": "left_click", "coordinate": [0, -1]}, r"\[0, -1\] is not on the 128x128"),
    ],
)
def test_a_wrong_call_is_refused_and_changes_nothing(
    arguments: dict[str, Any], message: str
) -> None:
    instance = open_screen(0)
    with pytest.raises(ToolError, match=message):
        instance.call("computer", arguments)
    assert clicks(instance) == []


def test_the_tool_names_the_size_of_its_screen() -> None:
    (tool,) = open_screen(0).tools()
    assert f"{WIDTH}x{HEIGHT}" in tool.description
    assert tool.parameters["properties"]["coordinate"]["items"] == {"type": "integer"}


def test_tasks_are_computer_use_and_mixed_up_ones_have_their_own_keys() -> None:
    task, control = make_task("screen", "heldout", 7), make_task("screen", "heldout", 7, MIXED_UP)
    assert task["task_modality"] == control["task_modality"] == "computer_use"
    assert (task["key"], control["key"]) == (
        "screen-heldout-000007",
        "screen-heldout-000007-mixed_up",
    )
    assert plan_calls(control) == plan_calls(draw_scenario("screen", "heldout-000007", MIXED_UP))


def test_prompts_name_colours_and_never_where_they_are() -> None:
    prompts = {make_task("screen", "train", index)["prompt"] for index in range(2000)}
    # Three phrasings of one colour or two.
    assert len(prompts) == 3 * (len(COLOURS) + len(COLOURS) ** 2)
    assert not any(character.isdigit() for prompt in prompts for character in prompt)


def test_the_screen_is_no_environment_of_tools_alone() -> None:
    assert "screen" not in ENV_KEYS
    with pytest.raises(ValueError, match="'v1' or 'mixed_up'"):
        open_instance("screen", "train-000000", "v2")
