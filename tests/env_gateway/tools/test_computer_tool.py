"""Pictures and points of the `computer` tool, between the screen and the policy."""

import base64
import io
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from flotilla_common.domain.attempts import ToolOutcome
from flotilla_common.tasks.task_format import TaskError
from flotilla_env_gateway.adapters.image_scaling import scale_image
from flotilla_env_gateway.config.gateway import ScreenConfig
from flotilla_env_gateway.ports import BackendError, CallResult, Media, Part, Text, Tool
from flotilla_env_gateway.tools.computer_tool import (
    Screen,
    ScreenSize,
    decode_embedded_image,
    find_screen_size,
    keep_unscaled,
    make_media,
)
from tests.support.fake_environments import ScriptedBackend
from tests.support.fake_gateway import open_spec, opened, running, states, task_json

COMPUTER = Tool(
    "computer", "Mouse and keyboard. The screen is 1280x800.", '{"type": "object", "x": "1280x800"}'
)
THOUSANDTHS = ScreenConfig(coordinates="relative1000")


def picture(width: int, height: int, kind: str = "PNG") -> Media:
    written = io.BytesIO()
    Image.new("RGB", (width, height), "teal").save(written, kind)
    return make_media(written.getvalue(), f"image/{kind.lower()}")


def size_of(part: Part) -> tuple[int, int]:
    assert isinstance(part, Media)
    with Image.open(io.BytesIO(part.data)) as image:
        return image.size


def converted(screen: Screen, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a call's arguments as the environment gets them."""
    [step] = screen.plan_call("computer", arguments).steps
    assert step.tool is COMPUTER
    return step.arguments


def test_the_resolution_is_read_from_the_description() -> None:
    assert find_screen_size([COMPUTER]) == ScreenSize(1280, 800)
    assert find_screen_size([Tool("computer", "A mouse.", "{}")]) == ScreenSize(1366, 768)


def test_thousandths_become_pixels() -> None:
    screen = Screen(THOUSANDTHS, [COMPUTER], keep_unscaled)
    arguments = {"action": "drag", "start_coordinate": [0, 0], "coordinate": [500, 999]}
    assert converted(screen, arguments) == {
        "action": "drag",
        "start_coordinate": [0, 0],
        "coordinate": [640, 799],
    }


def test_a_policy_of_thousandths_sees_a_screen_of_a_thousand() -> None:
    reported = Screen(THOUSANDTHS, [COMPUTER], keep_unscaled).describe_tool(COMPUTER)
    assert "1000x1000" in reported.description and "1280" not in reported.description
    assert "x from 0 to 999" in reported.description
    assert "1000x1000" in reported.input_schema_json


def test_a_policy_of_pixels_sees_the_unchanged_tool() -> None:
    assert Screen(ScreenConfig(), [COMPUTER], keep_unscaled).describe_tool(COMPUTER) is COMPUTER


def test_a_policy_that_sees_a_smaller_picture_points_into_that() -> None:
    screen = Screen(ScreenConfig(max_side=640), [COMPUTER], keep_unscaled)
    assert "640x400" in screen.describe_tool(COMPUTER).description
    assert converted(screen, {"coordinate": [639, 200]}) == {"coordinate": [1278, 400]}


@pytest.mark.parametrize(
    "point", [[1000, 0], [0, -1], [0], [1, 2, 3], "5,5", {"x": 1}, [True, 1], ["1", "2"], [None, 1]]
)
def test_a_point_beside_the_screen_is_reported_to_the_policy(point: object) -> None:
    with pytest.raises(TaskError, match="coordinate"):
        converted(Screen(THOUSANDTHS, [COMPUTER], keep_unscaled), {"coordinate": point})


@given(st.integers(0, 999), st.integers(0, 999))
def test_a_point_is_always_on_the_screen(x: int, y: int) -> None:
    screen = Screen(THOUSANDTHS, [COMPUTER], keep_unscaled)
    pixel_x, pixel_y = converted(screen, {"coordinate": [x, y]})["coordinate"]
    assert 0 <= pixel_x < 1280 and 0 <= pixel_y < 800


async def test_a_cursor_position_comes_back_in_the_policys_units() -> None:
    screen = Screen(THOUSANDTHS, [COMPUTER], keep_unscaled)
    assert await screen.convert_parts([Text("X=640,Y=799")]) == (Text("X=500,Y=998"),)
    assert await screen.convert_parts([Text("X=1280, Y=800")]) == (Text("X=999,Y=999"),)


async def test_a_picture_shrinks_in_proportion_and_gets_its_own_hash() -> None:
    large = picture(1280, 800)
    [small] = await Screen(ScreenConfig(max_side=640), [COMPUTER], scale_image).convert_parts(
        [large]
    )
    assert isinstance(small, Media)
    assert (small.width, small.height, small.size) == (640, 400, len(small.data))
    assert size_of(small) == (640, 400)
    assert small.sha256 != large.sha256 and small.mime == "image/png"


async def test_a_picture_that_fits_is_passed_on_byte_for_byte() -> None:
    jpeg = picture(600, 400, "JPEG")
    [shown] = await Screen(ScreenConfig(max_side=640), [COMPUTER], scale_image).convert_parts(
        [jpeg]
    )
    assert shown is jpeg


async def test_a_picture_that_cannot_be_read_is_reported() -> None:
    screen = Screen(ScreenConfig(max_side=64), [COMPUTER], scale_image)
    broken = [
        make_media(b"not a picture", "image/png"),
        make_media(picture(99, 99).data[:60], "image/png"),
    ]
    for part in await screen.convert_parts(broken):
        assert isinstance(part, Text) and "cannot be read" in part.text


def test_a_picture_in_json_text_is_a_picture() -> None:
    data = picture(10, 20).data
    encoded = base64.b64encode(data).decode()
    for value in (encoded, f"data:image/png;base64,{encoded}"):
        part = decode_embedded_image(Text(json.dumps({"base64_image": value})))
        assert isinstance(part, Media) and (part.data, part.width, part.height) == (data, 10, 20)


def test_a_screenshot_that_failed_is_reported_as_failed() -> None:
    for value in (None, "", "%%%"):
        part = decode_embedded_image(Text(json.dumps({"base64_image": value})))
        assert isinstance(part, Text) and part.text.startswith("Screenshot capture failed")


def test_text_that_only_mentions_a_picture_stays_text() -> None:
    for text in ('say "base64_image"', '["base64_image"]', '{"nested": {"base64_image": 1}}'):
        assert decode_embedded_image(Text(text)) == Text(text)


class ScreenBackend(ScriptedBackend):
    """A fake whose one tool is a computer that answers with a picture of its screen."""

    def __init__(self) -> None:
        super().__init__()
        self.tools = (COMPUTER,)
        self.first_observation = (picture(1280, 800),)
        self.seen: list[Mapping[str, Any]] = []
        self.hook = self._answer

    async def _answer(self, name: str, arguments: Mapping[str, Any]) -> CallResult:
        self.seen.append(arguments)
        return CallResult((picture(1280, 800), Text("X=64,Y=80")))


async def test_an_episode_of_computer_use_shows_and_points_as_configured() -> None:
    backend = ScreenBackend()
    screen = {"coordinates": "relative1000", "max_side": 320}
    spec = open_spec(task=task_json(task_modality="computer_use"))
    async with running(
        backend, scale=scale_image, environments={"fake": {"screen": screen}}
    ) as gateway:
        session = await opened(gateway, spec)
        assert size_of(session.first_observation[0]) == (320, 200)
        click = json.dumps({"action": "left_click", "coordinate": [500, 500]})
        answer, _ = await gateway.call_tool(session, 0, "computer", click, 5.0)
        beside = json.dumps({"action": "left_click", "coordinate": [1280, 0]})
        refused, _ = await gateway.call_tool(session, 1, "computer", beside, 5.0)
    assert backend.seen == [{"action": "left_click", "coordinate": [640, 400]}]
    assert size_of(answer.parts[0]) == (320, 200)
    assert answer.parts[1] == Text("X=50,Y=100")
    assert refused.outcome is ToolOutcome.BAD_ARGUMENTS


async def test_only_a_look_at_the_screen_is_sent_again_when_its_fate_is_unknown() -> None:
    backend = ScreenBackend()
    spec = open_spec(task=task_json(task_modality="computer_use"))
    async with running(backend) as gateway:
        session = await opened(gateway, spec)
        backend.fail_at("call", BackendError("cut", "the stream ended", delivered=None))
        looked, _ = await gateway.call_tool(session, 0, "computer", '{"action": "screenshot"}', 5.0)
        backend.fail_at("call", BackendError("cut", "the stream ended", delivered=None))
        clicked, _ = await gateway.call_tool(
            session, 1, "computer", '{"action": "left_click"}', 5.0
        )
    assert (looked.outcome, looked.attempts) == (ToolOutcome.OK, 2)
    assert clicked.outcome is ToolOutcome.OUTCOME_UNKNOWN


@pytest.mark.parametrize("position", ["X=" + "9" * 5000 + ",Y=1", "X=1,Y=" + "9" * 400])
async def test_a_position_that_no_screen_has_is_text_like_any_other(position: str) -> None:
    screen = Screen(THOUSANDTHS, [COMPUTER], keep_unscaled)
    assert await screen.convert_parts([Text(position)]) == (Text(position),)


async def test_a_screen_of_no_size_is_the_usual_one() -> None:
    tool = Tool("computer", "A screen of 000x000 pixels.", "{}")
    screen = Screen(THOUSANDTHS, [tool], keep_unscaled)
    assert screen.pixels == ScreenSize(1366, 768)
    assert await screen.convert_parts([Text("X=1,Y=1")]) == (Text("X=0,Y=1"),)


class CuaBackend(ScreenBackend):
    """A fake of Fleet's CUA tools; `refuse` names one that answers with an error."""

    def __init__(self, refuse: str = "") -> None:
        super().__init__()
        names = ("computer_screenshot", "mouse_click", "mouse_move", "mouse_scroll")
        self.tools = tuple(Tool(name, "", "{}") for name in names)
        self.called: list[str] = []
        self.hook = self._answer_cua
        self._refuse = refuse

    async def _answer_cua(self, name: str, arguments: Mapping[str, Any]) -> CallResult:
        self.called.append(name)
        return CallResult((Text(f"did {name}"),), is_error=name == self._refuse)


SCROLL = json.dumps({"type": "scroll", "x": 1, "y": 1, "scroll_y": 100})


async def test_an_action_of_several_calls_is_answered_by_the_last_of_them() -> None:
    backend = CuaBackend()
    spec = open_spec(task=task_json(task_modality="computer_use"))
    async with running(backend, screen={"vocabulary": "openai"}) as gateway:
        session = await opened(gateway, spec)
        answer, _ = await gateway.call_tool(session, 0, "computer", SCROLL, 5.0)
    assert backend.called == ["mouse_move", "mouse_scroll"]
    assert (answer.outcome, answer.attempts) == (ToolOutcome.OK, 2)
    assert answer.parts == (Text("did mouse_scroll"),)


@pytest.mark.parametrize(
    ("refuse", "called", "told"),
    [
        ("mouse_move", ["mouse_move"], []),
        (
            "mouse_scroll",
            ["mouse_move", "mouse_scroll"],
            [Text("(1 of 2 parts of this action were done)")],
        ),
    ],
)
async def test_an_action_of_several_calls_ends_at_the_first_that_fails(
    refuse: str, called: list[str], told: list[Text]
) -> None:
    backend = CuaBackend(refuse)
    spec = open_spec(task=task_json(task_modality="computer_use"))
    async with running(backend, screen={"vocabulary": "openai"}) as gateway:
        session = await opened(gateway, spec)
        answer, _ = await gateway.call_tool(session, 0, "computer", SCROLL, 5.0)
    assert backend.called == called
    assert answer.outcome is ToolOutcome.TOOL_ERROR
    assert [*answer.parts] == [Text(f"did {refuse}"), *told]


async def test_a_policy_that_is_done_ends_its_episode_without_the_environment() -> None:
    backend = ScreenBackend()
    spec = open_spec(task=task_json(task_modality="computer_use"))
    async with running(backend) as gateway:
        session = await opened(gateway, spec)
        answer, _ = await gateway.call_tool(session, 0, "computer", '{"action": "done"}', 5.0)
    assert (answer.outcome, answer.done, backend.seen) == (ToolOutcome.OK, True, [])


async def test_a_screen_that_shows_nothing_by_itself_is_looked_at_first() -> None:
    backend = ScreenBackend()
    backend.first_observation = ()
    spec = open_spec(task=task_json(task_modality="browser_use"))
    async with running(backend) as gateway:
        session = await opened(gateway, spec)
    assert backend.seen == [{"action": "screenshot"}]
    assert size_of(session.first_observation[0]) == (1280, 800)


async def test_tools_beside_a_screen_keep_their_names_or_are_refused() -> None:
    backend = ScreenBackend()
    backend.tools = (Tool("wait", "A waiting list.", "{}"), COMPUTER, Tool("buy", "", "{}"))
    spec = open_spec(task=task_json(task_modality="joint"))
    async with running(backend, screen={"vocabulary": "anthropic"}) as gateway:
        session = await opened(gateway, spec)
        assert [*session.tools] == ["wait", "computer", "buy"]
    async with running(backend, screen={"vocabulary": "cua"}) as gateway:
        session, _ = await states(gateway, spec)
    assert "has a tool 'wait' beside its screen" in (session.failure or "")
