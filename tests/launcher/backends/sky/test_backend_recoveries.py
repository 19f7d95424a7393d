"""Replicas whose machines were taken away or are out of order: how long they are waited for."""

import asyncio
from pathlib import Path

import pytest

from services.launcher.backends.ports import BackendUnreachable
from services.launcher.backends.sky.backend import SkyBackend
from services.launcher.backends.sky.status import Cluster
from services.launcher.state import GATEWAY, LEARNER, ROLLOUT, ExitStatus
from tests.launcher.backends.sky.starting import brief
from tests.support.fake_sky import FakeSky

_PATIENCE_S = 0.8
_GIVEN_UP = ExitStatus(1, "no such machine is available now", preempted=True)


@pytest.fixture
def successor(sky: FakeSky, tmp_path: Path, root: Path) -> SkyBackend:
    return SkyBackend(tmp_path / "runs", root, sky, poll_s=0.02)


async def test_a_learner_that_finds_no_other_machine_in_time_restarts_with_its_group(
    sky: FakeSky, backend: SkyBackend
) -> None:
    keys = ((LEARNER, 0), (GATEWAY, 0), (ROLLOUT, 0))
    starts = (backend.start_replica(brief(key, patience_s=_PATIENCE_S)) for key in keys)
    learner, gateway, rollout = await asyncio.gather(*starts)
    ends = asyncio.gather(*(backend.wait_for_exit(unit) for unit in (learner, gateway)))
    sky.put(learner.name, status="RECOVERING", submitted=True, started=True)
    await asyncio.sleep(_PATIENCE_S / 2)
    # It found no machine and sleeps between two tries: the patience continues to run out.
    sky.put(learner.name, status="PENDING")
    assert not ends.done()
    assert await ends == [_GIVEN_UP, _GIVEN_UP]
    sky.put(rollout.name, status="CANCELLED")
    assert await backend.wait_for_exit(rollout) == ExitStatus(-15, preempted=True)
    again = await backend.start_replica(brief((LEARNER, 0), patience_s=_PATIENCE_S))
    assert sky.job(again.name).goes_on and len(sky.submitted) == 2


async def test_a_replica_that_finds_machines_again_and_again_is_never_given_up(
    sky: FakeSky, backend: SkyBackend
) -> None:
    await backend.start_replica(brief((LEARNER, 0)))
    unit = await backend.start_replica(brief((ROLLOUT, 0), patience_s=_PATIENCE_S))
    ended = asyncio.create_task(backend.wait_for_exit(unit))
    for _ in range(3):
        sky.put(unit.name, status="RECOVERING", submitted=True, started=True)
        await asyncio.sleep(_PATIENCE_S / 2)
        sky.put(unit.name, status="RUNNING")
        await asyncio.sleep(_PATIENCE_S / 2)
    assert not ended.done()
    sky.put(unit.name, status="RECOVERING")
    assert await ended == _GIVEN_UP
    assert sky.job(unit.name).status == "CANCELLED"


async def test_a_server_that_is_away_for_a_moment_prolongs_no_search(
    sky: FakeSky, backend: SkyBackend
) -> None:
    await backend.start_replica(brief((LEARNER, 0)))
    unit = await backend.start_replica(brief((ROLLOUT, 0), patience_s=_PATIENCE_S))
    sky.put(unit.name, status="RECOVERING", submitted=True, started=True)
    ended = asyncio.create_task(backend.wait_for_exit(unit))
    await asyncio.sleep(0.6 * _PATIENCE_S)
    sky.away = True
    with pytest.raises(BackendUnreachable):
        await ended
    sky.away = False
    assert await asyncio.wait_for(backend.wait_for_exit(unit), 0.8 * _PATIENCE_S) == _GIVEN_UP


async def test_a_gateway_that_finds_no_machine_does_not_end_its_learner(
    sky: FakeSky, backend: SkyBackend
) -> None:
    keys = ((LEARNER, 0), (GATEWAY, 0))
    starts = (backend.start_replica(brief(key, patience_s=_PATIENCE_S)) for key in keys)
    learner, gateway = await asyncio.gather(*starts)
    sky.put(gateway.name, status="RECOVERING", submitted=True, started=True)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(backend.wait_for_exit(gateway), 2 * _PATIENCE_S)
    assert sky.job(learner.name).status == "RUNNING"


async def test_a_successor_gives_up_a_search_as_well(
    sky: FakeSky, backend: SkyBackend, successor: SkyBackend
) -> None:
    wish = brief((LEARNER, 0), patience_s=_PATIENCE_S)
    unit = await backend.start_replica(wish)
    sky.put(unit.name, status="RECOVERING", submitted=True, started=True)
    assert await successor.attach_replica(wish, unit)
    assert await successor.wait_for_exit(unit) == _GIVEN_UP


async def test_a_cluster_that_is_out_of_order_for_a_while_is_taken_over(
    sky: FakeSky, backend: SkyBackend, successor: SkyBackend
) -> None:
    wish = brief((ROLLOUT, 0), "cluster")
    unit = await backend.start_replica(wish)
    sky.stand_still(unit.name, "INIT")
    attached = asyncio.create_task(successor.attach_replica(wish, unit))
    await asyncio.sleep(0.3)
    assert not attached.done() and unit.name in sky.machines
    sky.machines[unit.name] = Cluster(unit.name, "UP")
    assert await attached


@pytest.mark.parametrize("status", ["INIT", "STOPPED"])
async def test_a_cluster_that_stays_out_of_order_is_not_taken_over(
    sky: FakeSky, backend: SkyBackend, successor: SkyBackend, status: str
) -> None:
    wish = brief((ROLLOUT, 0), "cluster")
    unit = await backend.start_replica(wish)
    sky.stand_still(unit.name, status)
    assert not await successor.attach_replica(wish, unit)
    assert sky.machines == {}


async def test_a_cluster_whose_launch_was_never_finished_is_launched_again_at_once(
    sky: FakeSky, backend: SkyBackend, successor: SkyBackend
) -> None:
    wish = brief((ROLLOUT, 0), "cluster")
    unit = await backend.start_replica(wish)
    sky.stand_still(unit.name, "INIT")
    assert await asyncio.wait_for(successor.find_replica(wish), 0.5) is None
    assert unit.name in sky.machines
