"""Every vocabulary of a policy, against every vocabulary of an environment."""

import json
from collections.abc import Mapping
from fractions import Fraction
from itertools import product
from typing import Any, get_args

import jsonschema
import pytest

from flotilla_common.tasks.task_format import TaskError
from flotilla_env_gateway.config.gateway import EnvGatewayConfig, ScreenConfig
from flotilla_env_gateway.ports import Tool
from flotilla_env_gateway.tools.action_vocabularies import (
    VOCABULARIES,
    VocabularyName,
    find_family_units,
)
from flotilla_env_gateway.tools.computer_tool import Screen, keep_unscaled
from flotilla_env_gateway.tools.offered_screen import ForeignScreen
from flotilla_env_gateway.tools.screen_actions import ScreenAction, Units
from flotilla_env_gateway.tools.spoken_screen import SpokenScreen, find_vocabulary
from tests.support.repository import ROOT

NAMES: tuple[VocabularyName, ...] = get_args(VocabularyName)
WIDTH, HEIGHT = 1366, 768
# Of the table in docs/env_gateway.md, and its last row but one.
COLUMNS: tuple[VocabularyName, ...] = ("fleet", "anthropic", "cua", "openai")
WAIT = [" wait ", *([" `wait` "] * 4)]
Call = tuple[str, dict[str, Any]]


def computer(**arguments: Any) -> Call:
    return ("computer", arguments)


# One action in every vocabulary, in pixels of the screen.
SAID: Mapping[str, Mapping[VocabularyName, Call]] = {
    "look": {
        "fleet": computer(action="screenshot"),
        "anthropic": computer(action="screenshot"),
        "cua": ("computer_screenshot", {}),
        "openai": computer(type="screenshot"),
    },
    "click": {
        "fleet": computer(action="left_click", coordinate=[683, 384]),
        "anthropic": computer(action="left_click", coordinate=[683, 384]),
        "cua": ("mouse_click", {"x": 683, "y": 384, "button": "left", "repeats": 1}),
        "openai": computer(type="click", x=683, y=384, button="left"),
    },
    "double click": {
        "fleet": computer(action="double_click", coordinate=[683, 384]),
        "anthropic": computer(action="double_click", coordinate=[683, 384]),
        "cua": ("mouse_click", {"x": 683, "y": 384, "button": "left", "repeats": 2}),
        "openai": computer(type="double_click", x=683, y=384),
    },
    "middle click": {
        "fleet": computer(action="middle_click", coordinate=[683, 384]),
        "anthropic": computer(action="middle_click", coordinate=[683, 384]),
        "cua": ("mouse_click", {"x": 683, "y": 384, "button": "middle", "repeats": 1}),
        "openai": computer(type="click", x=683, y=384, button="wheel"),
    },
    "move": {
        "fleet": computer(action="mouse_move", coordinate=[683, 384]),
        "anthropic": computer(action="mouse_move", coordinate=[683, 384]),
        "cua": ("mouse_move", {"x": 683, "y": 384}),
        "openai": computer(type="move", x=683, y=384),
    },
    "drag": {
        "fleet": computer(
            action="left_click_drag", start_coordinate=[683, 0], coordinate=[683, 384]
        ),
        "anthropic": computer(
            action="left_click_drag", start_coordinate=[683, 0], coordinate=[683, 384]
        ),
        "cua": (
            "mouse_drag",
            {"x_start": 683, "y_start": 0, "x_end": 683, "y_end": 384, "button": "left"},
        ),
        "openai": computer(type="drag", path=[{"x": 683, "y": 0}, {"x": 683, "y": 384}]),
    },
    "scroll": {
        "fleet": computer(action="scroll", scroll_direction="up", scroll_amount=2),
        "anthropic": computer(action="scroll", scroll_direction="up", scroll_amount=2),
        "cua": ("mouse_scroll", {"dx": 0, "dy": -200}),
        "openai": computer(type="scroll", scroll_x=0, scroll_y=-200),
    },
    "type": {
        "fleet": computer(action="type", text="Ünïted + 1"),
        "anthropic": computer(action="type", text="Ünïted + 1"),
        "cua": ("type_text", {"input_text": "Ünïted + 1", "press_enter": False}),
        "openai": computer(type="type", text="Ünïted + 1"),
    },
    "keys": {
        "fleet": computer(action="key", text="ctrl+shift+Page_Down"),
        "anthropic": computer(action="key", text="ctrl+shift+Page_Down"),
        "cua": ("key_combination", {"keys_to_press": ["Control", "Shift", "PageDown"]}),
        "openai": computer(type="keypress", keys=["CTRL", "SHIFT", "PAGEDOWN"]),
    },
    "letter": {
        "fleet": computer(action="key", text="ctrl+a"),
        "anthropic": computer(action="key", text="ctrl+a"),
        "cua": ("key_combination", {"keys_to_press": ["Control", "a"]}),
        "openai": computer(type="keypress", keys=["CTRL", "A"]),
    },
    "wait": {
        "fleet": computer(action="wait", duration=1),
        "anthropic": computer(action="wait", duration=1),
        "cua": ("wait", {"seconds": 1}),
        "openai": computer(type="wait"),
    },
}


def tools_of(name: VocabularyName) -> list[Tool]:
    """The tools of a server that speaks a whole vocabulary, in pixels."""
    pixels = Units(WIDTH, HEIGHT)
    # One that can do everything: Anthropic's, and Fleet's CUA tools for what only these can.
    able = SpokenScreen(
        VOCABULARIES["cua"], [Tool(v.name, "", "{}") for v in VOCABULARIES["cua"].verbs], pixels
    )
    screen = ForeignScreen(VOCABULARIES[name], able, pixels)
    described = [tool for tool in screen.list_tools("") if tool.name != "done"]
    return [
        Tool(t.name, f"The screen has {WIDTH}x{HEIGHT} pixels.", t.input_schema_json)
        for t in described
    ]


def screen_between(
    offered: VocabularyName, spoken: VocabularyName, coordinates: Any = "pixels"
) -> Screen:
    config = ScreenConfig(vocabulary=offered, coordinates=coordinates)
    return Screen(config, tools_of(spoken), keep_unscaled)


def sent(screen: Screen, call: Call) -> list[Call]:
    planned = screen.plan_call(*call)
    return [(step.tool.name, dict(step.arguments)) for step in planned.steps]


def in_thousandths(call: Call) -> Call:
    """What Fleet's CUA server is sent for a call in pixels."""
    places = {683: 500, 384: 500}
    name, arguments = call
    return name, {
        key: places.get(value, value) if key[0] in "xy" and key != "y_start" else value
        for key, value in arguments.items()
    }


@pytest.mark.parametrize("what", SAID)
@pytest.mark.parametrize(("offered", "spoken"), [*product(NAMES, NAMES)])
def test_an_action_of_any_vocabulary_reaches_any_other(
    offered: VocabularyName, spoken: VocabularyName, what: str
) -> None:
    said, expected = SAID[what][offered], SAID[what][spoken]
    if spoken == "cua":
        expected = in_thousandths(expected)
    assert sent(screen_between(offered, spoken), said) == [expected]


@pytest.mark.parametrize("spoken", NAMES)
def test_the_tools_of_a_server_tell_its_vocabulary(spoken: VocabularyName) -> None:
    # Fleet's `computer` has Anthropic's names.
    expected = "fleet" if spoken == "anthropic" else spoken
    assert find_vocabulary(tools_of(spoken)).name == expected


@pytest.mark.parametrize("offered", NAMES)
def test_the_offered_schemas_accept_what_the_vocabulary_says(offered: VocabularyName) -> None:
    tools = screen_between(offered, "fleet" if offered != "fleet" else "cua").offered
    for tool in tools.values():
        jsonschema.Draft202012Validator.check_schema(json.loads(tool.input_schema_json))
    for said in SAID.values():
        name, arguments = said[offered]
        jsonschema.validate(arguments, json.loads(tools[name].input_schema_json))


@pytest.mark.parametrize(
    ("coordinates", "point"),
    [("pixels", [683, 384]), ("relative1000", [500, 500]), ("normalized", [0.5, 0.5])],
)
@pytest.mark.parametrize("offered", ["fleet", "anthropic"])
def test_a_point_in_any_units_is_the_same_pixel(
    offered: VocabularyName, coordinates: str, point: list[float]
) -> None:
    screen = screen_between(offered, "openai", coordinates)
    [(_, arguments)] = sent(screen, computer(action="left_click", coordinate=point))
    assert (arguments["x"], arguments["y"]) == (683, 384)


def test_both_ends_of_normalized_coordinates_are_on_the_screen() -> None:
    screen = screen_between("fleet", "fleet", "normalized")
    [(_, corner)] = sent(screen, computer(action="left_click", coordinate=[1, 1.0]))
    assert corner["coordinate"] == [WIDTH - 1, HEIGHT - 1]
    with pytest.raises(TaskError, match="x and y must be from 0 to 1"):
        sent(screen, computer(action="left_click", coordinate=[1.01, 0.5]))


@pytest.mark.parametrize("spoken", NAMES)
@pytest.mark.parametrize("offered", NAMES)
def test_done_ends_the_episode_in_every_vocabulary(
    offered: VocabularyName, spoken: VocabularyName
) -> None:
    screen = screen_between(offered, spoken)
    vocabulary = VOCABULARIES[offered]
    call = computer(**{vocabulary.verb_key: "done"}) if vocabulary.verb_key else ("done", {})
    planned = screen.plan_call(*call)
    assert planned.done and not planned.steps
    schema = screen.offered[call[0]].input_schema_json
    assert not vocabulary.verb_key or '"done"' in schema


WRONG: tuple[tuple[VocabularyName, Call, str], ...] = (
    ("openai", computer(type="tap", x=1, y=1), "type must be one of: screenshot, click"),
    ("openai", computer(x=1, y=1), "type must be one of"),
    ("openai", computer(type=["click"], x=1, y=1), "type must be one of"),
    ("openai", computer(type="click", x=1), "x and y must be"),
    ("openai", computer(type="click"), "click needs x and y"),
    ("openai", computer(type="click", x=1, y=1, button=4), "button must be left, right or wheel"),
    ("openai", computer(type="click", x=1, y=1, z=1), "click takes .* and not 'z'"),
    ("openai", computer(type="click", x=float("nan"), y=1), "two numbers"),
    ("openai", computer(type="click", x=10**400, y=1), "not on the screen"),
    ("openai", computer(type="drag", path=[{"x": 1, "y": 1}]), "path must be a list of two"),
    ("openai", computer(type="drag", path=[1, 2]), "path must be a list of two"),
    ("openai", computer(type="drag", path=[{"x": 1}, {"y": 2}]), "two numbers"),
    ("openai", computer(type="keypress", keys=[]), r'keys must be a list of keys, .*"CTRL"'),
    ("openai", computer(type="keypress", keys=[1]), "keys must be a list"),
    ("openai", computer(type="scroll", scroll_y="1"), "whole numbers of pixels"),
    ("openai", computer(type="scroll", scroll_y=10**9), "whole numbers of pixels"),
    ("openai", computer(type="type", text=5), "text must be a string"),
    ("cua", ("mouse_click", {"x": 1, "y": 1, "repeats": 7}), "repeats must be .* from 1 to 3"),
    ("cua", ("mouse_click", {"x": 1, "y": 1, "repeats": True}), "repeats must be"),
    ("cua", ("type_text", {"input_text": "a", "press_enter": 1}), "press_enter must be true"),
    ("cua", ("type_text", {}), "type_text needs input_text"),
    ("cua", ("wait", {"seconds": "long"}), "seconds must be seconds"),
    ("cua", ("wait", {"seconds": 1e9}), "seconds must be seconds"),
    ("anthropic", computer(action="scroll", scroll_direction="in"), "scroll_direction must be"),
    (
        "anthropic",
        computer(action="scroll", scroll_direction="up", scroll_amount=-1),
        "scroll_amount must be a whole number",
    ),
    ("anthropic", computer(action="scroll", scroll_direction=["up"]), "scroll_direction must be"),
    ("anthropic", computer(action="key", text=""), r"text must be keys, as ctrl\+a"),
    ("anthropic", computer(action="mouse_move"), "mouse_move needs coordinate"),
    ("anthropic", computer(action="mouse_move", coordinate=[2000, 1]), "not on the screen"),
    ("anthropic", computer(action="left_mouse_down", coordinate=5), "two numbers"),
)


@pytest.mark.parametrize(("offered", "call", "message"), WRONG)
def test_a_wrong_argument_is_told_precisely(
    offered: VocabularyName, call: Call, message: str
) -> None:
    spoken: VocabularyName = "cua" if offered != "cua" else "openai"
    with pytest.raises(TaskError, match=message):
        screen_between(offered, spoken).plan_call(*call)


def test_an_action_that_an_environment_lacks_is_done_by_those_it_has() -> None:
    openai_at_cua = screen_between("openai", "cua")
    scroll = computer(type="scroll", x=683, y=384, scroll_x=100, scroll_y=-250)
    assert sent(openai_at_cua, scroll) == [
        ("mouse_move", {"x": 500, "y": 500}),
        ("mouse_scroll", {"dx": 100, "dy": -300}),
    ]
    cua_at_fleet = screen_between("cua", "fleet")
    assert sent(cua_at_fleet, ("type_text", {"input_text": "a", "press_enter": True})) == [
        computer(action="type", text="a"),
        computer(action="key", text="Return"),
    ]
    assert sent(cua_at_fleet, ("mouse_scroll", {"dx": 100, "dy": 100})) == [
        computer(action="scroll", scroll_direction="right", scroll_amount=1),
        computer(action="scroll", scroll_direction="down", scroll_amount=1),
    ]
    anthropic_at_cua = screen_between("anthropic", "cua")
    held = computer(action="left_click", coordinate=[683, 384], text="shift")
    assert [name for name, _ in sent(anthropic_at_cua, held)] == [
        "key_down",
        "mouse_click",
        "key_up",
    ]
    hold = computer(action="hold_key", text="ctrl+a", duration=2)
    assert sent(anthropic_at_cua, hold) == [
        ("key_down", {"key": "Control"}),
        ("key_down", {"key": "a"}),
        ("wait", {"seconds": 2}),
        ("key_up", {"key": "a"}),
        ("key_up", {"key": "Control"}),
    ]


def test_what_no_action_of_an_environment_does_is_not_offered_and_refused() -> None:
    schema = {"properties": {"action": {"enum": ["screenshot", "left_click"]}, "coordinate": {}}}
    tool = Tool("computer", "A screen.", json.dumps(schema))
    screen = Screen(ScreenConfig(vocabulary="openai"), [tool], keep_unscaled)
    offered = json.loads(screen.offered["computer"].input_schema_json)["properties"]
    assert offered["type"]["enum"] == ["screenshot", "click", "done"]
    with pytest.raises(TaskError, match=r"cannot do: click \(button right\)"):
        screen.plan_call("computer", {"type": "click", "x": 1, "y": 1, "button": "right"})
    with pytest.raises(TaskError, match="type must be one of: screenshot, click, done"):
        screen.plan_call("computer", {"type": "keypress", "keys": ["A"]})


def test_an_environment_is_sent_no_property_that_it_does_not_declare() -> None:
    schema = {"properties": {"action": {"enum": ["wait", "key"]}, "text": {}}}
    tool = Tool("computer", "A screen.", json.dumps(schema))
    screen = Screen(ScreenConfig(vocabulary="cua"), [tool], keep_unscaled)
    assert sent(screen, ("wait", {"seconds": 3})) == [computer(action="wait")]


def test_an_environments_own_words_pass_in_its_own_vocabulary() -> None:
    schema = {"properties": {"action": {"enum": ["navigate", "left_click"]}, "url": {}}}
    tool = Tool("computer", "A browser.", json.dumps(schema))
    screen = Screen(ScreenConfig(), [tool], keep_unscaled)
    call = computer(action="navigate", url="http://app")
    assert sent(screen, call) == [call]
    assert json.loads(screen.offered["computer"].input_schema_json)["properties"]["action"] == {
        "enum": ["navigate", "left_click", "done"]
    }


def test_a_cua_server_keeps_its_thousandths_unless_the_policy_points_otherwise() -> None:
    own = Screen(ScreenConfig(), tools_of("cua"), keep_unscaled)
    click = ("mouse_click", {"x": 999, "y": 1, "button": "left", "repeats": 1})
    assert sent(own, click) == [click]
    pixels = Screen(ScreenConfig(coordinates="pixels"), tools_of("cua"), keep_unscaled)
    assert "x from 0 to 1365" in pixels.offered["mouse_click"].description
    assert sent(pixels, ("mouse_click", {"x": 1365, "y": 1})) == [click]


@pytest.mark.parametrize(
    ("model", "units"),
    [
        ("Qwen/Qwen3-VL-8B-Instruct", "relative1000"),
        ("/models/Qwen2.5-VL-7B", "pixels"),
        ("qwen3_vl_moe", "relative1000"),
        ("qwen2_5_vl", "pixels"),
        ("Qwen/Qwen3-8B", None),
    ],
)
def test_a_family_points_as_it_was_trained_to(model: str, units: str | None) -> None:
    assert find_family_units(model) == units


def test_the_settings_go_before_the_family() -> None:
    config = EnvGatewayConfig.model_validate(
        {
            "backends": {"embedded": {}},
            "environments": {
                "a": {"screen": {"max_side": 512}},
                "b": {"screen": {"coordinates": "normalized"}},
            },
        }
    ).fill_coordinates("relative1000")
    coordinates = [config.screen_config_of(key).coordinates for key in ("a", "b", "c")]
    assert coordinates == ["relative1000", "normalized", "relative1000"]
    assert config.screen_config_of("a").max_side == 512


def test_the_page_names_every_action_of_every_vocabulary() -> None:
    page = (ROOT / "docs/env_gateway.md").read_text()
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("|")]
    head = next(row for row in rows if [cell.strip("` ") for cell in row[1:]] == [*COLUMNS])
    table = rows[rows.index(head) :][: rows[rows.index(head) :].index(WAIT) + 2]
    for column, name in enumerate(COLUMNS, start=1):
        said = " ".join(row[column] for row in table)
        if name == "anthropic":
            # Its clicks are "the same" as Fleet's.
            said += " ".join(row[1] for row in table)
        for verb in VOCABULARIES[name].verbs:
            assert f"`{verb.name}`" in said, (name, verb.name)


def test_an_action_says_only_what_differs() -> None:
    assert ScreenAction("click").changed_fields() == set()
    at = ScreenAction("click", point=(Fraction(0), Fraction(0)), clicks=2)
    assert at.changed_fields() == {"point", "clicks"}
