"""Fleet's screen, used by policies that speak other vocabularies and point in other units."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from flotilla_common.domain.attempts import ToolOutcome
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.ports import Media, Text
from flotilla_environments.api import open_instance
from flotilla_environments.fleet_emulator.computer.layout import HEIGHT, WIDTH
from flotilla_environments.fleet_emulator.computer.screen import Screen
from flotilla_environments.reference_policies import plan_calls
from tests.env_gateway.backends.bench import Bench
from tests.env_gateway.backends.fleet_harness import Emulator, fleet_bench
from tests.support.fake_gateway import open_spec, opened

Call = tuple[str, dict[str, Any]]
RANGES = {"pixels": (WIDTH, HEIGHT), "relative1000": (1000, 1000), "normalized": (1, 1)}
VOCABULARIES = ("fleet", "anthropic", "cua", "openai")


def place(coordinates: str, pixel: tuple[int, int]) -> tuple[float, float]:
    """Return where a policy points for a pixel: at its middle."""
    x, y = (
        (at + 0.5) / whole * units
        for at, whole, units in zip(pixel, (WIDTH, HEIGHT), RANGES[coordinates], strict=True)
    )
    return (x, y) if coordinates == "normalized" else (int(x), int(y))


def click(vocabulary: str, x: float, y: float) -> Call:
    if vocabulary == "cua":
        return "mouse_click", {"x": x, "y": y, "button": "left"}
    if vocabulary == "openai":
        return "computer", {"type": "click", "x": x, "y": y, "button": "left"}
    return "computer", {"action": "left_click", "coordinate": [x, y]}


def write(vocabulary: str, text: str) -> Call:
    if vocabulary == "cua":
        return "type_text", {"input_text": text, "press_enter": False}
    return "computer", {"type" if vocabulary == "openai" else "action": "type", "text": text}


def confirm(vocabulary: str) -> Call:
    if vocabulary == "cua":
        return "key_combination", {"keys_to_press": ["Enter"]}
    if vocabulary == "openai":
        return "computer", {"type": "keypress", "keys": ["ENTER"]}
    return "computer", {"action": "key", "text": "Return"}


def pixels_of_booking() -> Mapping[str, tuple[int, int]]:
    """Return the middles of the app's buttons, and of the fields of each one's form."""
    screen = Screen("Booking", open_instance("booking", "train-000000"))
    found: dict[str, tuple[int, int]] = {}
    for button in [element for element in screen.list_elements() if element.target]:
        found[button.text] = button.box.middle
        screen.click_at(*button.box.middle)
        for field in screen.list_elements():
            if field.kind == "field" and field.target:
                found[f"{button.text}.{field.target[1]}"] = field.box.middle
    return found


async def open_screen(bench: Bench, modality: str = "computer_use", attempt: int = 0) -> Session:
    text = json.dumps({**bench.harness.task(0), "task_modality": modality})
    return await opened(bench.gateway, open_spec(attempt, task=text))


async def actions_of(emulator: Emulator, session: Session) -> list[dict[str, Any]]:
    assert session.instance is not None
    instance_id = session.instance.instance_id
    return (await emulator.call("GET", f"/_emulator/actions/{instance_id}"))["actions"]


def screen_section(**screen: Any) -> Mapping[str, Any]:
    return {"screen": screen}


@pytest.mark.parametrize("coordinates", RANGES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
async def test_a_task_is_solved_on_the_screen_in_every_vocabulary_and_units(
    emulator: Emulator, vocabulary: str, coordinates: str
) -> None:
    pixels = pixels_of_booking()
    section = screen_section(vocabulary=vocabulary, coordinates=coordinates)
    async with fleet_bench(emulator, section=section) as bench:
        session = await open_screen(bench)
        (shown,) = session.first_observation
        assert isinstance(shown, Media) and (shown.width, shown.height) == (WIDTH, HEIGHT)
        clicked: list[tuple[int, int]] = []

        async def use(call: Call) -> None:
            answer = await bench.call(session, call)
            assert answer.outcome is ToolOutcome.OK, answer
            assert any(isinstance(part, Media) for part in answer.parts)

        for name, arguments in plan_calls(bench.harness.task(0)):
            for target in (name, *(f"{name}.{field}" for field in arguments)):
                clicked.append(pixels[target])
                await use(click(vocabulary, *place(coordinates, pixels[target])))
                if target != name:
                    await use(write(vocabulary, str(arguments[target.removeprefix(f"{name}.")])))
            await use(confirm(vocabulary))
        done = await actions_of(emulator, session)
        landed = [action["coordinate"] for action in done if action["action"] == "left_click"]
        assert len(landed) == len(clicked) > 2
        # Whole thousandths of a screen are wider than its pixels; all else hits the very pixel.
        reach = 2 if coordinates == "relative1000" else 0
        for (x, y), (wanted_x, wanted_y) in zip(landed, clicked, strict=True):
            assert abs(x - wanted_x) <= reach and abs(y - wanted_y) <= reach
        assert (await bench.grade(session)).reward == 1.0


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
async def test_a_wrong_action_is_read_by_the_policy_and_the_episode_is_graded(
    emulator: Emulator, vocabulary: str
) -> None:
    async with fleet_bench(emulator, section=screen_section(vocabulary=vocabulary)) as bench:
        session = await open_screen(bench)
        beside = await bench.call(session, click(vocabulary, 5000, 5))
        assert beside.outcome is ToolOutcome.BAD_ARGUMENTS
        (told,) = beside.parts
        assert isinstance(told, Text) and "[5000, 5] is not on the screen" in told.text
        assert [a["action"] for a in await actions_of(emulator, session)] == ["screenshot"]
        assert (await bench.grade(session)).reward == 0.0


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
async def test_a_policy_that_is_done_ends_the_episode(emulator: Emulator, vocabulary: str) -> None:
    key = {"cua": "", "openai": "type"}.get(vocabulary, "action")
    call = ("computer", {key: "done"}) if key else ("done", {})
    async with fleet_bench(emulator, section=screen_section(vocabulary=vocabulary)) as bench:
        session = await open_screen(bench)
        answer = await bench.call(session, call)
        assert (answer.outcome, answer.done) == (ToolOutcome.OK, True)
        assert [a["action"] for a in await actions_of(emulator, session)] == ["screenshot"]


async def test_a_browser_is_used_in_another_vocabulary_too(emulator: Emulator) -> None:
    section = screen_section(vocabulary="openai", coordinates="relative1000")
    async with fleet_bench(emulator, section=section) as bench:
        session = await open_screen(bench, "browser_use")
        pixel = next(iter(pixels_of_booking().values()))
        before = session.first_observation[0]
        answer = await bench.call(session, click("openai", *place("relative1000", pixel)))
        (after,) = answer.parts
        assert isinstance(before, Media) and isinstance(after, Media)
        assert after.sha256 != before.sha256


async def test_tasks_with_and_without_a_screen_run_side_by_side(emulator: Emulator) -> None:
    async with fleet_bench(emulator, section=screen_section(vocabulary="cua")) as bench:
        tools = await open_screen(bench, "tool_use", 0)
        screen = await open_screen(bench, "computer_use", 1)
        joint = await open_screen(bench, "joint", 2)
        assert not {"mouse_click", "computer"} & {*tools.tools}
        assert {"mouse_click", "done"} <= {*screen.tools} and not {*tools.tools} & {*screen.tools}
        assert {*joint.tools} == {*tools.tools, *screen.tools}
        await bench.solve(tools)
        assert (await bench.grade(tools)).reward == 1.0


async def test_a_screenshot_that_fails_later_is_text_that_the_policy_reads(
    emulator: Emulator,
) -> None:
    async with fleet_bench(emulator, section=screen_section(vocabulary="cua")) as bench:
        session = await open_screen(bench)
        await emulator.faults(pictures="null")
        answer = await bench.call(session, ("computer_screenshot", {}))
        assert answer.outcome is ToolOutcome.OK
        assert answer.parts == (Text("Screenshot capture failed (null image)"),)
