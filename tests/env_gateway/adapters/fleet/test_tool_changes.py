"""Tools of Fleet's instances that change under one version."""

import json
from typing import Any

import pytest
from structlog.testing import capture_logs

from flotilla_common.domain.attempts import ToolOutcome
from flotilla_env_gateway.adapters.backend_factory import build_backend
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from tests.env_gateway.backends.apps import BookingTasks
from tests.env_gateway.backends.fleet_harness import Emulator, fleet_bench
from tests.support.fake_gateway import open_spec, opened
from tests.support.grading_gateway import grading_gateway

CHANGED = {"added": [], "removed": ["cancel_booking"], "changed": []}


def told(events: list[Any]) -> list[Any]:
    changes = [event for event in events if event["event"] == "tools_changed"]
    return [{kind: event[kind] for kind in CHANGED} for event in changes]


@pytest.mark.parametrize("modality", ["tool_use", "joint"])
async def test_a_new_episode_gets_the_tools_that_an_image_has_now(
    emulator: Emulator, modality: str
) -> None:
    async with fleet_bench(emulator) as bench:
        task = json.dumps({**bench.harness.task(0), "task_modality": modality})
        with capture_logs() as events:
            first, second = [await opened(bench.gateway, open_spec(n, task=task)) for n in range(2)]
            assert told(events) == [] and first.tools == second.tools
            await emulator.faults(removed_tools=["cancel_booking"])
            third = await opened(bench.gateway, open_spec(2, task=task))
        assert first.tools.keys() - third.tools.keys() == {"cancel_booking"}
        assert told(events) == [CHANGED]
        answer = await bench.call(second, ("cancel_booking", {"booking_id": 1}))
        assert answer.outcome is ToolOutcome.TOOL_ERROR
        assert (await bench.call(second, bench.harness.read_call)).outcome is ToolOutcome.OK


async def test_a_new_episode_of_a_server_with_instances_gets_its_tools_of_now(
    emulator: Emulator,
) -> None:
    url, key = emulator.config()["url"], emulator.config()["api_key_env"]
    server = {"url": url, "api_key_env": key, "instances": True}
    config = EnvGatewayConfig.model_validate({"backend": "mcp", "servers": [server]})
    backend = build_backend("mcp", config)
    task = json.dumps(BookingTasks().task(0))
    await emulator.forget()
    try:
        async with grading_gateway({"mcp": backend}, config) as gateway:
            with capture_logs() as events:
                first = await opened(gateway, open_spec(0, task=task))
                await emulator.faults(removed_tools=["cancel_booking"])
                second = await opened(gateway, open_spec(1, task=task))
            assert first.tools.keys() - second.tools.keys() == {"cancel_booking"}
            assert told(events) == [CHANGED]
            await gateway.drain(0.0)
    finally:
        await backend.close()
        await emulator.faults()
