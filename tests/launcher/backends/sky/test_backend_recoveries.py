"""Replicas of a dead launcher whose machines are out of order: how long they are waited for."""

import asyncio
from pathlib import Path

import pytest

from flotilla_launcher.backends.sky import cluster
from flotilla_launcher.backends.sky.backend import SkyBackend
from flotilla_launcher.backends.sky.sdk import SkyClient
from flotilla_launcher.state import ROLLOUT
from tests.launcher.backends.sky.starting import brief, until_answered
from tests.support.skypilot.server import Server


@pytest.fixture
def successor(client: SkyClient, tmp_path: Path, root: Path) -> SkyBackend:
    return SkyBackend(tmp_path / "runs", root, client, poll_s=0.02, silent_s=0.0)


async def test_a_machine_that_is_out_of_order_for_a_while_is_taken_over(
    sky: Server, backend: SkyBackend, successor: SkyBackend
) -> None:
    wish = brief((ROLLOUT, 0))
    unit = await backend.start_replica(wish)
    sky.state.clusters[unit.name].status = "INIT"
    attached = asyncio.create_task(until_answered(lambda: successor.attach_replica(wish, unit)))
    await asyncio.sleep(0.3)
    assert not attached.done() and unit.name in sky.state.machines
    sky.state.clusters[unit.name].status = "UP"
    assert await attached


@pytest.mark.parametrize("status", ["INIT", "STOPPED"])
async def test_a_machine_that_stays_out_of_order_is_not_taken_over(
    sky: Server,
    backend: SkyBackend,
    successor: SkyBackend,
    status: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "_MAX_BROKEN_LOOKS", 10)
    wish = brief((ROLLOUT, 0))
    unit = await backend.start_replica(wish)
    sky.state.clusters[unit.name].status = status
    assert not await successor.attach_replica(wish, unit)
    assert sky.state.machines == {}


async def test_a_launch_that_was_never_finished_is_repeated_without_delay(
    sky: Server, backend: SkyBackend, successor: SkyBackend
) -> None:
    wish = brief((ROLLOUT, 0))
    unit = await backend.start_replica(wish)
    sky.state.clusters[unit.name].status = "INIT"
    assert await asyncio.wait_for(successor.find_replica(wish), 1.0) is None
    assert unit.name in sky.state.machines


async def test_a_launch_that_ended_before_its_machine_had_an_address_is_repeated(
    sky: Server, backend: SkyBackend, successor: SkyBackend
) -> None:
    wish = brief((ROLLOUT, 0))
    unit = await backend.start_replica(wish)
    sky.state.clusters[unit.name].has_address = False
    assert await asyncio.wait_for(successor.find_replica(wish), 5.0) is None
    assert not await asyncio.wait_for(successor.attach_replica(wish, unit), 5.0)
    assert unit.name in sky.state.machines
