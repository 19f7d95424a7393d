"""What a gateway tells of environments that change, and what it lists again."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from flotilla_env_gateway.api.alarms import GatewayAlarms
from flotilla_env_gateway.api.status import update_alarms_forever
from flotilla_env_gateway.episodes import tool_watch
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.ports import BackendError
from tests.support.fake_environments import TOOLS, FakeInstance, ScriptedBackend
from tests.support.fake_gateway import open_spec, opened, running
from tests.support.waiting import until


def instance_of(session: Session) -> FakeInstance:
    assert isinstance(session.instance, FakeInstance)
    return session.instance


def named(events: list[Any], name: str) -> list[Any]:
    return [event for event in events if event["event"] == name]


async def test_a_version_that_changes_in_mid_run_is_an_event_and_an_alarm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, alarms, changed = ScriptedBackend(), GatewayAlarms(), asyncio.Event()
    async with running(backend) as gateway:
        keeping = asyncio.create_task(update_alarms_forever(gateway, alarms, changed.set))
        await opened(gateway, open_spec(0))
        monkeypatch.setattr(FakeInstance, "env_version", "v2")
        with capture_logs() as events:
            for attempt in (1, 2):
                await opened(gateway, open_spec(attempt))
        async with asyncio.timeout(10.0):
            await changed.wait()
        keeping.cancel()
    (event,) = named(events, "version_changed")
    assert (event["env"], event["version_before"], event["version"]) == ("fake", "v1", "v2")
    (alarm,) = alarms.raised
    assert (alarm.rule, alarm.scope) == ("version_changed", "fake")
    assert alarm.cause == "its version changed from 'v1' to 'v2'"


async def test_a_server_that_announces_without_end_is_listed_in_paces() -> None:
    backend = ScriptedBackend()
    backend.delays["list_tools"] = 0.01
    async with running(backend) as gateway:
        session = await opened(gateway)
        for _ in range(50):
            instance_of(session).announce()
            await asyncio.sleep(0.005)
        assert backend.steps["list_tools"] == 2, "once to open, and once for what came since"


async def test_the_last_of_several_changes_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_watch, "_PAUSE_S", 0.01)
    backend = ScriptedBackend()
    async with running(backend) as gateway:
        session = await opened(gateway)
        backend.delays["list_tools"] = 0.05
        backend.tools = ()
        instance_of(session).announce()
        await asyncio.sleep(0.02)
        backend.tools = TOOLS[:1]
        instance_of(session).announce()
        await until(lambda: session.vanished == frozenset({"add"}))


async def test_tools_that_cannot_be_listed_again_are_told_and_cost_nothing() -> None:
    backend = ScriptedBackend()
    async with running(backend) as gateway:
        session = await opened(gateway)
        backend.fail_at("list_tools", BackendError("http", "HTTP 503", delivered=False))
        with capture_logs() as events:
            instance_of(session).announce()
            await until(lambda: bool(named(events, "tools_changed_in_episode")))
        assert "HTTP 503" in named(events, "tools_changed_in_episode")[0]["error"]
        answer, _ = await gateway.call_tool(session, 0, "add", "{}", 5.0)
        assert answer.outcome == "ok" and not session.episode.lost


async def test_nothing_is_listed_for_an_episode_that_has_ended() -> None:
    backend = ScriptedBackend()
    async with running(backend) as gateway:
        session = await opened(gateway)
        backend.delays["list_tools"] = 60.0
        instance_of(session).announce()
        await asyncio.sleep(0)
        listing = session.listing_again
        gateway.close(session.episode.episode_id)
        assert listing is not None
        await asyncio.wait({listing}, timeout=5.0)
        assert listing.cancelled()
