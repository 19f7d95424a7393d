"""A call's points, in the units of its tool, as pixels of the picture that it saw."""

from typing import Any

import pytest

from flotilla_common.episodes.episode_text import EpisodeCall
from flotilla_reading.inspector.pages.clicks import mark_call

RELATIVE = "Coordinates are [x, y] with x from 0 to 999 and y from 0 to 999, whatever the size."
NORMALIZED = "Coordinates are x and y, numbers from 0 to 1 of the screen's width and height."
SCREEN = (1366, 768)


def points(
    arguments: dict[str, Any] | str, description: str = "", name: str = "computer"
) -> list[tuple[float, float]]:
    mark = mark_call(EpisodeCall("c", name, arguments), description, 1, SCREEN)
    return [(round(x, 6), round(y, 6)) for x, y in mark.points] if mark else []


@pytest.mark.parametrize(
    ("description", "point", "expected"),
    [
        ("", [683, 384], (683, 384)),
        (RELATIVE, [500, 250], (683, 192)),
        (NORMALIZED, [0.5, 0.25], (683, 192)),
        ("A screen of 1366x768 pixels.", [683, 384], (683, 384)),
        ("The screen is 2732 x 1536.", [683, 384], (341.5, 192)),
    ],
)
def test_a_point_is_in_the_units_that_the_description_names(
    description: str, point: list[float], expected: tuple[float, float]
) -> None:
    call = {"action": "left_click", "coordinate": point}
    assert points(call, description) == [expected]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"coordinate": [9, 8], "start_coordinate": [1, 2]}, [(1, 2), (9, 8)]),
        ({"type": "click", "x": 3, "y": 4}, [(3, 4)]),
        ({"x_start": 1, "y_start": 2, "x_end": 3, "y_end": 4}, [(1, 2), (3, 4)]),
        ({"type": "drag", "path": [{"x": 1, "y": 2}, [3, 4]]}, [(1, 2), (3, 4)]),
        ({"path": [[n, n] for n in range(99)]}, [(n, n) for n in range(64)]),
    ],
)
def test_points_of_every_vocabulary_are_found(
    arguments: dict[str, Any], expected: list[tuple[float, float]]
) -> None:
    assert points(arguments) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        "no JSON",
        {"action": "type", "text": "hello"},
        {"coordinate": None},
        {"coordinate": [1]},
        {"coordinate": ["1", "2"]},
        {"coordinate": [float("nan"), 1]},
        {"coordinate": [1, float("nan")]},
        {"coordinate": [float("inf"), 1]},
        {"coordinate": [10**400, 1]},
        {"coordinate": {"x": 1}},
        {"path": [[1, 2, 3], 4, None]},
    ],
)
def test_a_call_without_a_point_leaves_no_mark(arguments: dict[str, Any] | str) -> None:
    assert points(arguments) == []


def test_x_and_y_of_a_tool_without_a_screen_are_no_point() -> None:
    assert points({"x": 1, "y": 2}, "Moves a piece.", name="move_piece") == []
    assert points({"x": 1, "y": 2}, f"Moves. {RELATIVE}", name="mouse_move") != []


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ("", (683, 192)),
        ("x and y are normalized to 0 to 1000, of a 1366x768 screen.", (683, 192)),
        ("Clicks. Coordinates are [x, y] with x from 0 to 1365 and y from 0 to 767.", (500, 250)),
    ],
)
def test_tools_of_fleets_cua_server_point_in_thousandths_unless_they_are_described_anew(
    description: str, expected: tuple[float, float]
) -> None:
    assert points({"x": 500, "y": 250}, description, name="mouse_click") == [expected]


def test_a_mark_names_the_turn_and_the_action() -> None:
    mark = mark_call(
        EpisodeCall("c", "computer", {"action": "left_click", "coordinate": [1, 2]}), "", 3, SCREEN
    )
    assert mark is not None
    assert (mark.label, mark.line) == ("turn 3, left_click", "1,2")
