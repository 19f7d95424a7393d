"""Fleet's tasks with a screen: the first screenshot, the one tool, and browsers that are leased."""

import asyncio
import json
from typing import Any

import pytest

from flotilla_common.domain.attempts import ToolOutcome
from flotilla_common.tasks.task_format import parse_task
from flotilla_env_gateway.adapters.fleet.screen import parse_screenshot
from flotilla_env_gateway.episodes.episode_book import EpisodeState
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.ports import (
    BackendError,
    CallResult,
    Media,
    Orphan,
    ProvisionRequest,
    Text,
)
from tests.env_gateway.backends.bench import TIMEOUT_S, Bench
from tests.env_gateway.backends.fleet_harness import Emulator, fleet_bench
from tests.support.fake_gateway import open_spec, opened, states

LOOK = ("computer", {"action": "screenshot"})
SCREENS = ("computer_use", "browser_use")


def task(bench: Bench, modality: str) -> str:
    return json.dumps({**bench.harness.task(0), "task_modality": modality})


async def open_screen(bench: Bench, modality: str, attempt: int = 0) -> Session:
    return await opened(bench.gateway, open_spec(attempt, task=task(bench, modality)))


async def leases(emulator: Emulator, *lease_ids: str) -> int:
    """Return the number of these browsers."""
    found = 0
    for lease_id in lease_ids:
        try:
            await emulator.call("GET", f"/v1/browser/{lease_id}")
        except AssertionError as error:
            assert "not found" in str(error)
        else:
            found += 1
    return found


def lease_of(session: Session) -> str:
    assert session.instance is not None
    return session.instance.instance_id.split("~")[1]


@pytest.mark.parametrize("modality", SCREENS)
@pytest.mark.parametrize("pictures", ["image", "json"])
async def test_the_policy_sees_the_screen_first_and_has_one_tool(
    emulator: Emulator, modality: str, pictures: str
) -> None:
    async with fleet_bench(emulator) as bench:
        await emulator.faults(pictures=pictures)
        session = await open_screen(bench, modality)
        assert set(session.tools) == {"computer"}
        (shown,) = session.first_observation
        assert isinstance(shown, Media) and shown.mime == "image/png"
        assert shown.width and shown.height
        answer = await bench.call(session, LOOK)
        assert answer.outcome is ToolOutcome.OK
        assert any(isinstance(part, Media) for part in answer.parts)
        assert (await bench.grade(session)).reward == 0.0


async def test_a_task_for_tools_has_no_screen_and_a_joint_one_has_both(
    emulator: Emulator,
) -> None:
    async with fleet_bench(emulator) as bench:
        tools = await open_screen(bench, "tool_use", 0)
        joint = await open_screen(bench, "joint", 1)
        assert "computer" not in tools.tools and tools.first_observation == ()
        assert set(joint.tools) == {*tools.tools, "computer"}
        assert (await bench.call(joint, LOOK)).outcome is ToolOutcome.OK
        await bench.solve(joint)
        assert (await bench.grade(joint)).reward == 1.0


async def test_a_screen_is_only_requested_where_it_is(emulator: Emulator) -> None:
    """The aggregator is used even if the other address serves."""
    async with fleet_bench(emulator) as bench:
        down = {"on": ["mcp"], "endpoint": "mcp", "rate": 1.0}
        await emulator.faults(faults=[down])
        await bench.call(await open_screen(bench, "computer_use"), LOOK)
        assert (await emulator.count())["injected"] == {}


async def test_a_screen_that_shows_nothing_fails_the_open(emulator: Emulator) -> None:
    async with fleet_bench(emulator, section={"open_timeout_s": 0.8}) as bench:
        await emulator.faults(pictures="null")
        spec = open_spec(task=task(bench, "computer_use"))
        session, entered = await states(bench.gateway, spec)
        assert entered[-1] is EpisodeState.FAILED
        assert "the first screenshot is no picture" in (session.failure or "")


async def test_a_screen_that_shows_nothing_yet_is_retried(emulator: Emulator) -> None:
    async with fleet_bench(emulator) as bench:
        await emulator.faults(pictures="null")
        opening = asyncio.create_task(open_screen(bench, "computer_use"))
        await asyncio.sleep(0.3)
        assert not opening.done()
        await emulator.faults()
        assert (await opening).first_observation


async def test_a_browser_that_has_drawn_nothing_is_not_shown() -> None:
    blank = CallResult((Media(b"p" * 100, "image/png", b"h", 100),))
    assert await parse_screenshot(blank, in_browser=False)
    for result, in_browser in ((blank, True), (CallResult((Text("busy"),)), False)):
        with pytest.raises(BackendError) as caught:
            await parse_screenshot(result, in_browser=in_browser)
        assert (caught.value.delivered, caught.value.invalid) == (False, False)


async def test_a_browser_is_given_back_with_its_instance(emulator: Emulator) -> None:
    async with fleet_bench(emulator) as bench:
        session = await open_screen(bench, "browser_use")
        lease = lease_of(session)
        assert await leases(emulator, lease) == 1
        await bench.close(session)
        assert (await leases(emulator, lease), await bench.running()) == (0, 0)


async def test_a_browser_of_a_gateway_that_was_killed_is_given_back_too(
    emulator: Emulator,
) -> None:
    async with fleet_bench(emulator) as bench:
        request = ProvisionRequest("run.gw.browser-1", parse_task(task(bench, "browser_use")), 60.0)
        instance = await bench.provision(request)
        orphan = Orphan(request.episode_id, instance.instance_id)
        for _ in range(2):
            await bench.backend.reclaim_orphan(orphan, timeout_s=TIMEOUT_S)
        lease = instance.instance_id.split("~")[1]
        assert (await leases(emulator, lease), await bench.running()) == (0, 0)


async def test_an_instance_whose_browser_could_not_be_had_is_used_again(
    emulator: Emulator,
) -> None:
    async with fleet_bench(emulator) as bench:
        failing: dict[str, Any] = {"on": ["browser"], "replies": [{"status": 503}] * 2}
        await emulator.faults(faults=[failing])
        await open_screen(bench, "browser_use")
        assert await emulator.created() == 1


async def test_an_episode_whose_browser_is_gone_is_lost(emulator: Emulator) -> None:
    async with fleet_bench(emulator) as bench:
        session = await open_screen(bench, "browser_use")
        await emulator.call("DELETE", f"/v1/browser/{lease_of(session)}")
        answer = await bench.call(session, LOOK)
        assert answer.outcome is ToolOutcome.SESSION_LOST and "no browser" in str(answer.parts)
