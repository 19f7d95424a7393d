"""The emulator's screens: an app used by mouse and keyboard, at an instance and in a browser."""

import base64
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from flotilla_environments.api import Picture, ToolError, open_instance
from flotilla_environments.fleet_emulator.computer.layout import HEIGHT, WIDTH, Element
from flotilla_environments.fleet_emulator.computer.screen import Screen
from flotilla_environments.fleet_emulator.computer.tool import Computer
from flotilla_environments.reference_policies import plan_calls
from tests.environments.fleet_emulator_process import call_tool, created, emulating, execute, rpc

BOOKING = {"env_id": "booking", "data_id": "train-000000"}
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with emulating("--speed", "60") as address:
        yield address


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=20, headers={"authorization": "Bearer x"}) as client:
        yield client
        client.delete("/_emulator/faults")
        client.delete("/v1/env/instances/batch", params={"profile_id": "self"})


def computer() -> tuple[Computer, Screen]:
    screen = Screen("Booking", open_instance("booking", "train-000000"))
    return Computer(screen, lambda: "image"), screen


def middle(screen: Screen, kind: str, name: str) -> list[int]:
    found = next(element for element in screen.list_elements() if element.target == (kind, name))
    return list(found.box.middle)


def texts(screen: Screen) -> list[str]:
    return [element.text for element in screen.list_elements()]


def actions(name: str, arguments: dict[str, Any], fields: dict[str, list[int]]) -> Iterator[Any]:
    """Make a call by mouse and keyboard, like a user at the screen."""
    yield {"action": "left_click", "coordinate": fields[name]}
    for field, value in arguments.items():
        yield {"action": "left_click", "coordinate": fields[f"{name}.{field}"]}
        yield {"action": "type", "text": str(value)}
    yield {"action": "key", "text": "Return"}


def places() -> dict[str, list[int]]:
    """Return the places of the booking app's buttons and fields."""
    screen = Screen("Booking", open_instance("booking", "train-000000"))
    tools = [element for element in screen.list_elements() if element.target]
    found: dict[str, list[int]] = {}
    for tool in tools:
        assert tool.target is not None
        found[tool.text] = list(tool.box.middle)
        screen.click_at(*tool.box.middle)
        fields: list[Element] = [e for e in screen.list_elements() if e.kind == "field"]
        found |= {f"{tool.text}.{e.target[1]}": list(e.box.middle) for e in fields if e.target}
    return found


def test_a_task_is_solved_on_the_screen() -> None:
    instance = open_instance("booking", "train-000000")
    screen = Screen("Booking", instance)
    user = Computer(screen, lambda: "image")
    for name, arguments in plan_calls(BOOKING):
        for action in actions(name, arguments, places()):
            user.call("computer", action)
    assert texts(screen)[-1] == '{"ok": true}'
    assert len(instance.query("current", "select * from bookings").rows) < len(
        instance.query("seed", "select * from bookings").rows
    )


def test_the_same_actions_make_the_same_picture() -> None:
    pictures: list[bytes] = []
    for _ in range(2):
        user, _screen = computer()
        for action in actions("find_bookings", {"guest": "Ada", "city": "Oslo"}, places()):
            pictures.append(user.call("computer", action).png)
    half = len(pictures) // 2
    assert pictures[:half] == pictures[half:]
    assert len(set(pictures)) == half
    header = pictures[0]
    assert header[:8] == PNG
    assert (int.from_bytes(header[16:20]), int.from_bytes(header[20:24])) == (WIDTH, HEIGHT)
    assert len(base64.b64encode(header)) >= 8_192


def test_fields_are_edited_and_left_by_their_keys() -> None:
    _, screen = computer()
    screen.type_text("lost")
    screen.click_at(*middle(screen, "tool", "find_bookings"))
    screen.type_text("Adam")
    screen.press_key("BackSpace")
    screen.press_key("Tab")
    screen.type_text("x")
    screen.press_key("ctrl+a")
    screen.type_text("Oslo")
    assert [e.text for e in screen.list_elements() if e.kind == "field"] == ["Ada", "Oslo"]
    screen.click_at(*middle(screen, "run", ""))
    assert texts(screen)[-1] == "Error: not found"
    screen.click_at(*middle(screen, "tool", "cancel_booking"))
    screen.type_text("first")
    screen.press_key("Return")
    assert texts(screen)[-1] == "Error: booking_id must be of type integer"


def test_a_long_result_is_scrolled() -> None:
    screen = Screen("Booking", open_instance("fleet_booking", "kinesis", "v0.0.14"))
    screen.click_at(*middle(screen, "tool", "search_hotels"))
    screen.press_key("Return")
    before = texts(screen)
    screen.scroll_lines(1)
    assert before[-2] in texts(screen)
    assert before != texts(screen)
    screen.scroll_lines(-10_000)
    assert texts(screen) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "action: Field required"),
        ({"action": "left_click"}, "left_click needs coordinate"),
        ({"action": "left_click", "coordinate": [1]}, "coordinate: List should have at least 2"),
        ({"action": "left_click", "coordinate": [WIDTH, 0]}, "is not on the 1366x768 screen"),
        ({"action": "type"}, "type needs text"),
        ({"action": "navigate", "url": "http://x"}, "only a leased browser can navigate"),
        ({"action": "screenshot", "shade": 1}, "shade: Extra inputs are not permitted"),
    ],
)
def test_a_wrong_action_is_refused_precisely(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolError, match=message):
        computer()[0].call("computer", arguments)


def screenshot(http: httpx.Client, root: str) -> Any:
    reply = call_tool(http, root, "computer", {"action": "screenshot"}, "api/v1/mcp")
    return reply.json()["result"]["content"][0]


def test_an_instance_keeps_its_screen_until_it_is_reset(http: httpx.Client) -> None:
    instance = created(http, env_key="booking", data_key="train-000000", ttl_seconds=3_600)
    root = instance["urls"]["root"]
    before = screenshot(http, root)
    assert (before["type"], before["mimeType"]) == ("image", "image/png")
    for name, arguments in plan_calls(BOOKING):
        for action in actions(name, arguments, places()):
            reply = call_tool(http, root, "computer", action, "api/v1/mcp")
            assert base64.b64decode(reply.json()["result"]["content"][0]["data"])[:8] == PNG
    position = call_tool(http, root, "computer", {"action": "cursor_position"}, "api/v1/mcp")
    assert '"X=' in position.json()["result"]["content"][0]["text"]
    code = http.get("/v1/tasks/booking-train-000000").json()["verifier_func"]
    graded = execute(http, instance["instance_id"], f"{code}\nverify = validate_task", "done")
    assert graded["result"] == 1, graded
    assert screenshot(http, root) != before
    http.post(f"{instance['urls']['manager']['reset']}", json={}).raise_for_status()
    assert screenshot(http, root) == before


def test_pictures_may_come_as_json_or_not_at_all(http: httpx.Client) -> None:
    root = created(http, ttl_seconds=3_600)["urls"]["root"]
    http.post("/_emulator/faults", json={"pictures": "json"}).raise_for_status()
    value = json.loads(screenshot(http, root)["text"])
    prefix, data = value["base64_image"].split(",")
    assert (prefix, base64.b64decode(data)[:8]) == ("data:image/png;base64", PNG)
    http.post("/_emulator/faults", json={"pictures": "null"}).raise_for_status()
    assert screenshot(http, root)["text"] == '{"base64_image": null}'


def browse(http: httpx.Client, mcp_url: str, **arguments: Any) -> Any:
    call = {"name": "computer", "arguments": arguments}
    return rpc(http, mcp_url, "tools/call", call).json()["result"]


def test_a_leased_browser_opens_the_page_of_an_instance(http: httpx.Client) -> None:
    instance = created(http, env_key="booking", data_key="train-000000", ttl_seconds=3_600)
    page = instance["urls"]["app"][0]
    lease = http.post("/v1/browser", json={"ttl_seconds": 600, "allowed_hosts": ["127.0.0.1"]})
    mcp_url, address = lease.json()["mcp_url"], f"/v1/browser/{lease.json()['lease_id']}"
    assert http.get(f"{address}/health").json()["healthy"] is True
    tools = rpc(http, mcp_url, "tools/list").json()["result"]["tools"]
    assert [tool["name"] for tool in tools] == ["computer"]
    blank = browse(http, mcp_url, action="screenshot")
    shown = browse(http, mcp_url, action="navigate", url=page)
    assert shown["isError"] is False
    assert shown != blank
    for action in actions("search_hotels", {"name": "X", "city": "Y"}, places()):
        browse(http, mcp_url, **action)
    assert http.get("/_emulator/counters").json()["tools"]["search_hotels"] == 1
    for wrong in ("http://elsewhere.test/", "http://127.0.0.1/never/"):
        assert browse(http, mcp_url, action="navigate", url=wrong)["isError"] is True
    assert http.delete(address).json()["status"] == "released"
    assert http.get(address).status_code == 404
    assert rpc(http, mcp_url, "tools/list").status_code == 502


def test_a_lease_ends_by_itself(http: httpx.Client) -> None:
    lease = http.post("/v1/browser", json={"ttl_seconds": 6}).json()
    time.sleep(0.15)
    assert http.get(f"/v1/browser/{lease['lease_id']}").status_code == 404


def test_an_app_that_draws_its_own_screens_has_one_computer(http: httpx.Client) -> None:
    root = created(http, env_key="screen", data_key="heldout-000002")["urls"]["root"]
    listed = rpc(http, f"{root}api/v1/mcp", "tools/list").json()["result"]["tools"]
    assert [tool["name"] for tool in listed] == ["computer"]
    shown = call_tool(http, root, "computer", {"action": "screenshot"}, "api/v1/mcp").json()
    [picture] = shown["result"]["content"]
    own = open_instance("screen", "heldout-000002").call("computer", {"action": "screenshot"})
    assert Picture(base64.b64decode(picture["data"])) == own
