"""Tasks on the screen of any MCP server that returns pictures, whatever vocabulary it speaks."""

import json
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from flotilla_common.domain.attempts import ToolOutcome
from flotilla_env_gateway.adapters.backend_factory import build_backend
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.ports import CallAnswer, Media, Part, Text
from tests.support.fake_gateway import open_spec, opened, task_json
from tests.support.grading_gateway import grading_gateway
from tests.support.repository import ROOT
from tests.support.screen_mcp_server import HEIGHT, WIDTH

SERVER = ROOT / "tests/support/screen_mcp_server.py"
# What the server speaks, and what the policy is offered.
PAIRS = (("cua", "openai"), ("anthropic", "cua"), ("openai", "fleet"), ("cua", "cua"))
# The button's middle, in thousandths of the screen.
X, Y = 187, 350
VERIFIER = """
def clicked(env, final_answer=None):
    clicks, typed = env.call_tool("list_clicks")
    return int(clicks == [[59, 70]] and typed == ["milk"])
"""


@asynccontextmanager
async def gateway_of(spoken: str, **screen: Any) -> AsyncGenerator[Gateway]:
    command = [sys.executable, str(SERVER), spoken]
    config = EnvGatewayConfig.model_validate(
        {
            "backend": "mcp",
            "servers": [{"transport": "stdio", "command": command}],
            "screen": screen,
            "open_timeout_s": 60.0,
            "verifiers": {"unsafe_local_verifiers": True},
        }
    )
    backend = build_backend("mcp", config)
    try:
        async with grading_gateway({"mcp": backend}, config) as gateway:
            yield gateway
    finally:
        await backend.close()


async def open_screen(gateway: Gateway, modality: str = "computer_use") -> Session:
    task = task_json(task_modality=modality, verifier_func=VERIFIER)
    return await opened(gateway, open_spec(task=task))


async def call(
    gateway: Gateway, session: Session, name: str, arguments: Mapping[str, Any]
) -> CallAnswer:
    seq = session.episode.next_seq
    return (await gateway.call_tool(session, seq, name, json.dumps(arguments), 30.0))[0]


def click_and_type(vocabulary: str) -> list[tuple[str, dict[str, Any]]]:
    if vocabulary == "cua":
        return [
            ("mouse_click", {"x": X, "y": Y, "button": "left"}),
            ("type_text", {"input_text": "milk", "press_enter": False}),
        ]
    if vocabulary == "openai":
        return [
            ("computer", {"type": "click", "x": X, "y": Y, "button": "left"}),
            ("computer", {"type": "type", "text": "milk"}),
        ]
    return [
        ("computer", {"action": "left_click", "coordinate": [X, Y]}),
        ("computer", {"action": "type", "text": "milk"}),
    ]


@pytest.mark.parametrize(("spoken", "offered"), PAIRS)
async def test_a_task_is_solved_on_the_screen_of_a_server(spoken: str, offered: str) -> None:
    screen = {"vocabulary": offered, "coordinates": "relative1000"}
    async with gateway_of(spoken, **screen) as gateway:
        session = await open_screen(gateway)
        assert "list_clicks" not in session.tools
        see_screen(session.first_observation)
        for name, arguments in click_and_type(offered):
            answer = await call(gateway, session, name, arguments)
            assert answer.outcome is ToolOutcome.OK, answer
            if spoken != "cua":
                see_screen(answer.parts)
        grade = await gateway.grade_episode(session, "", None, 30.0)
        assert grade.reward == 1.0, grade


def see_screen(shown: Sequence[Part]) -> None:
    """Check that all pictures of an answer are there, and its text."""
    whole, middle, text = shown
    assert isinstance(whole, Media) and isinstance(middle, Media)
    assert (whole.width, whole.height) == (WIDTH, HEIGHT)
    assert (middle.width, middle.height) == (160, 100)
    assert text == Text("URL: /")


async def test_pictures_of_tools_reach_tasks_of_other_modalities() -> None:
    async with gateway_of("cua", vocabulary="fleet") as gateway:
        session = await open_screen(gateway, "joint")
        assert {*session.tools} == {"computer", "list_clicks"}
        assert session.first_observation == ()
        answer = await call(gateway, session, "computer", {"action": "screenshot"})
        assert [type(part) for part in answer.parts] == [Media, Media, Text]
