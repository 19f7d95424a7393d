"""The embedded environments behind the gateway, graded by real verifiers in real workers."""

import asyncio
import json

import pytest

from flotilla_common.domain.attempts import ToolOutcome
from flotilla_env_gateway.episodes.episode_book import EpisodeState
from flotilla_env_gateway.ports import Media, Text
from flotilla_environments.reference_policies import plan_calls
from flotilla_environments.tasks import make_task
from tests.support.fake_gateway import open_spec, opened, states
from tests.support.grading_gateway import ENV_KEYS, embedded_gateway, reward_of


@pytest.mark.parametrize("env_key", ENV_KEYS)
async def test_the_oracle_passes_and_doing_nothing_fails(env_key: str) -> None:
    async with embedded_gateway() as gateway:
        for index in range(4):
            task = make_task(env_key, "train", index)
            assert await reward_of(gateway, task, act=True, attempt=2 * index) == 1.0
            assert await reward_of(gateway, task, act=False, attempt=2 * index + 1) == 0.0


async def test_a_tool_that_refuses_gives_the_policy_the_reason() -> None:
    async with embedded_gateway() as gateway:
        task = make_task("booking", "train", 0)
        session = await opened(gateway, open_spec(task=json.dumps(task)))
        name = plan_calls(task)[0][0]
        answer, _ = await gateway.call_tool(session, 0, name, '{"nonsense": 1}', 5.0)
        assert answer.outcome is ToolOutcome.TOOL_ERROR
        assert isinstance(answer.parts[0], Text) and answer.parts[0].text


async def test_an_app_that_is_used_by_its_screen_is_seen_and_graded() -> None:
    async with embedded_gateway() as gateway:
        task = make_task("screen", "train", 0)
        session = await opened(gateway, open_spec(task=json.dumps(task)))
        look = '{"action": "screenshot"}'
        answer, _ = await gateway.call_tool(session, 0, "computer", look, 5.0)
        [shown] = answer.parts
        assert isinstance(shown, Media)
        assert (shown.mime, shown.width, shown.height) == ("image/png", 128, 128)
        assert await reward_of(gateway, task, act=True, attempt=1) == 1.0
        assert await reward_of(gateway, task, act=False, attempt=2) == 0.0


async def test_data_that_does_not_exist_fails_the_open_at_once() -> None:
    task = make_task("booking", "train", 0) | {"data_id": "nowhere"}
    async with embedded_gateway() as gateway:
        session, entered = await states(gateway, open_spec(task=json.dumps(task)))
        assert entered[-1] is EpisodeState.FAILED
        assert "nowhere" in (session.failure or "")


async def test_hundreds_of_episodes_open_at_once() -> None:
    task = json.dumps(make_task("shop", "train", 1))
    async with embedded_gateway() as gateway:
        specs = [open_spec(i, task=task, opening=8, group_id=f"g{i // 8}") for i in range(256)]
        sessions = await asyncio.gather(*(opened(gateway, spec) for spec in specs))
        assert gateway.admission.held_places == 256
        for session in sessions:
            gateway.close(session.episode.episode_id)
