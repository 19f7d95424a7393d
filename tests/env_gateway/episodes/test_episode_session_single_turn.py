"""Questions without tools, through every door that the gateway has to this repository's apps."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla_common.domain.attempts import ToolOutcome
from flotilla_env_gateway.adapters.backend_factory import build_backend
from flotilla_env_gateway.api import codec
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.episodes.episode_book import EpisodeState
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_environments.gsm8k.__main__ import make_question_tasks
from flotilla_environments.gsm8k.dataset import Question
from tests.support.environment_processes import environment_command
from tests.support.fake_environments import ScriptedBackend
from tests.support.fake_gateway import open_spec, opened, running, states, task_json
from tests.support.grading_gateway import embedded_gateway, grading_gateway

REQUESTED = [Question("What is 5 + 7?", "12")]
ANSWERS = (
    ("5 + 7 = 12\n#### 12", 1.0, 1.0),
    ("5 + 7 = 13\n#### 13", 0.0, 0.0),
    ("It is 12", 0.0, 1.0),
    ("No idea.", 0.0, 0.0),
    ("", 0.0, 0.0),
    (None, 0.0, 0.0),
)


def question(rule: str) -> dict[str, Any]:
    [task] = make_question_tasks(REQUESTED, "train", env_key="gsm8k", rule=rule)
    return task


# The server of each backend, with further settings.
DOORS: dict[str, tuple[str, dict[str, Any]]] = {
    "embedded": ("", {}),
    "mcp": ("flotilla_environments.serve", {"instances": True}),
    "fleet": ("flotilla_environments.fleet_emulator", {}),
}


@asynccontextmanager
async def gateway_over(name: Any) -> AsyncGenerator[Gateway]:
    """Serve a gateway with the servers that it starts itself."""
    module, door = DOORS[name]
    if module:
        door = {**door, "command": environment_command("-m", module)}
    table = {"servers": [door]} if name == "mcp" else {"backends": {name: door}}
    settings = EnvGatewayConfig.model_validate({"backend": name, "open_timeout_s": 30.0, **table})
    backend = build_backend(name, settings)
    try:
        async with grading_gateway({name: backend}, settings) as gateway:
            yield gateway
    finally:
        await backend.close()


@pytest.mark.parametrize("name", DOORS)
async def test_an_answer_is_checked_by_the_rule_of_its_task(name: str) -> None:
    async with gateway_over(name) as gateway:
        rewards: list[tuple[str | None, float | None, float | None]] = []
        for index, (text, _, _) in enumerate(ANSWERS):
            strict, flexible = [
                await graded(gateway, rule, text, 2 * index + offset)
                for offset, rule in enumerate(("strict", "flexible"))
            ]
            rewards.append((text, strict, flexible))
        assert rewards == list(ANSWERS)


async def graded(gateway: Gateway, rule: str, text: str | None, attempt: int) -> float | None:
    spec = open_spec(attempt, task=json.dumps(question(rule)))
    session = await opened(gateway, spec)
    assert not session.tools
    grade = await gateway.grade_episode(session, text, None, 10.0)
    gateway.close(session.episode.episode_id)
    assert grade.reason is None, grade.detail
    assert len(grade.checks_passed) + len(grade.checks_failed) == 1
    return grade.reward


async def test_a_call_in_a_single_turn_finds_no_tool() -> None:
    task = task_json(task_modality="single_turn")
    async with running(ScriptedBackend()) as gateway:
        session = await opened(gateway, open_spec(task=task))
        answer, _ = await gateway.call_tool(session, 0, "look", "{}", 1.0)
        assert answer.outcome is ToolOutcome.BAD_TOOL


async def test_nothing_to_call_is_refused_unless_the_task_wants_nothing() -> None:
    backend = ScriptedBackend()
    backend.tools = ()
    async with running(backend) as gateway:
        session, entered = await states(gateway, open_spec(0))
        assert entered[-1] is EpisodeState.FAILED
        assert '"task_modality": "single_turn"' in (session.failure or "")
        single = task_json(task_modality="single_turn")
        _, entered = await states(gateway, open_spec(1, task=single))
        assert entered[-1] is EpisodeState.READY


async def test_the_question_is_all_that_the_policy_receives() -> None:
    async with embedded_gateway() as gateway:
        session = await opened(gateway, open_spec(task=json.dumps(question("strict"))))
        ready = codec.encode_ready(session, lease_ttl_s=1.0, remaining_s=1.0, transcript_bytes=0)
        assert ready.facts == pb.PromptFacts(prompt="What is 5 + 7?")
        assert not ready.tools and not ready.initial_observation
