"""The machine backend against an in-memory SkyPilot; tests/sky has the real one."""

import asyncio
import socket
from pathlib import Path

import pytest

from services.launcher.backends.ports import BackendUnreachable, CapacityError
from services.launcher.backends.sky import names
from services.launcher.backends.sky.backend import SkyBackend
from services.launcher.backends.sky.job_queue import JobQueue
from services.launcher.backends.sky.status import Cluster
from services.launcher.security.sealed_secrets import KEY_FILE, unseal_secrets
from services.launcher.state import GATEWAY, LEARNER, ROLLOUT, ExitStatus, Unit
from tests.launcher.backends.sky.starting import STATIC, brief, group
from tests.support import sky_launches
from tests.support.fake_sky import FakeSky


async def test_learner_and_gateways_are_one_group_and_rollouts_join_it(
    sky: FakeSky, backend: SkyBackend
) -> None:
    keys = (*STATIC, (ROLLOUT, 0))
    units = await asyncio.gather(*(backend.start_replica(brief(key)) for key in keys))
    (documents,) = sky.submitted
    assert [d["name"] for d in documents[1:]] == [units[0].name, units[1].name]
    assert [d["name"] for d in sky.attempts] == [units[2].name]
    for values in sky.secrets:
        unseal_secrets(opened := dict(values), Path(documents[1]["workdir"]) / KEY_FILE)
        assert opened["FLOTILLA_TOKEN"] == "canary-token"
    assert all(d["workdir"].endswith(f"{sky_launches.RUN_ID}/code") for d in documents[1:])


async def test_a_replica_ends_as_its_job_does(sky: FakeSky, backend: SkyBackend) -> None:
    await group(backend)
    unit = await backend.start_replica(brief((ROLLOUT, 0)))
    ended = asyncio.create_task(backend.wait_for_exit(unit))
    sky.put(unit.name, status="RECOVERING")
    await asyncio.sleep(0.1)
    assert not ended.done()
    sky.put(unit.name, status="FAILED", reason="it broke")
    assert await ended == ExitStatus(1, "it broke")


async def test_a_rollout_that_is_killed_leaves_the_group_alone(
    sky: FakeSky, backend: SkyBackend
) -> None:
    learner, _ = await group(backend)
    unit = await backend.start_replica(brief((ROLLOUT, 0)))
    await backend.kill_replica(unit)
    assert await backend.wait_for_exit(unit) == ExitStatus(-15)
    assert not sky.job(learner.name).over
    again = await backend.start_replica(brief((ROLLOUT, 0)))
    assert again.name == unit.name
    # The record of the first start does not end the second.
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(backend.wait_for_exit(again), 0.1)


async def test_members_that_go_with_their_learner_have_not_failed(
    sky: FakeSky, backend: SkyBackend
) -> None:
    learner, gateway = await group(backend)
    rollout = await backend.start_replica(brief((ROLLOUT, 0)))
    sky.put(learner.name, status="FAILED", reason="it broke")
    for unit in (gateway, rollout):
        sky.put(unit.name, status="CANCELLED")
        assert await backend.wait_for_exit(unit) == ExitStatus(-15, preempted=True)
    assert await backend.wait_for_exit(learner) == ExitStatus(1, "it broke")


async def test_a_gateway_that_is_killed_gets_another_machine(
    sky: FakeSky, backend: SkyBackend
) -> None:
    learner, gateway = await group(backend)
    await backend.kill_replica(gateway)
    assert sky.job(gateway.name).cluster not in sky.machines
    assert await backend.wait_for_exit(gateway) == ExitStatus(-9)
    await backend.start_replica(brief((GATEWAY, 0)))
    assert sky.attempts == [] and not sky.job(learner.name).over


async def test_a_gateway_that_has_ended_joins_its_group_again(
    sky: FakeSky, backend: SkyBackend
) -> None:
    _, gateway = await group(backend)
    sky.put(gateway.name, status="FAILED")
    await backend.start_replica(brief((GATEWAY, 0)))
    assert [document["name"] for document in sky.attempts] == [gateway.name]


@pytest.mark.parametrize("begun", [True, False])
async def test_what_skypilot_has_lost_control_of_is_ended(
    sky: FakeSky, backend: SkyBackend, begun: bool
) -> None:
    await group(backend)
    unit = await backend.start_replica(brief((ROLLOUT, 0)))
    cluster = sky.job(unit.name).cluster
    sky.put(unit.name, status="FAILED_CONTROLLER", reason="its controller broke")
    sky.machines[cluster] = Cluster(cluster, "UP", managed=True)
    if begun:
        assert await backend.wait_for_exit(unit) == ExitStatus(
            1, "its controller broke", unready=True
        )
    else:
        await backend.undo_start(brief((ROLLOUT, 0)))
    assert cluster not in sky.machines and len(sky.machines) == 2


async def test_a_learner_that_has_ended_begins_a_group_again(
    sky: FakeSky, backend: SkyBackend
) -> None:
    learner, gateway = await group(backend)
    sky.put(learner.name, status="FAILED")
    await group(backend)
    assert len(sky.submitted) == 2
    assert sky.job(gateway.name).job_id == sky.job(learner.name).job_id == 2


async def test_a_server_that_is_away_ends_nothing(sky: FakeSky, backend: SkyBackend) -> None:
    learner, _ = await group(backend)
    sky.away = True
    for query in (
        backend.wait_for_exit(learner),
        backend.clean_run(sky_launches.RUN_ID),
        backend.reap_orphans([]),
    ):
        with pytest.raises(BackendUnreachable):
            await query
    sky.away = False
    assert not sky.job(learner.name).over and len(sky.machines) == 2


async def test_a_successor_finds_what_runs_by_name(
    sky: FakeSky, backend: SkyBackend, tmp_path: Path, root: Path
) -> None:
    learner, gateway = await group(backend)
    successor = SkyBackend(tmp_path / "runs", root, sky, poll_s=0.02)
    assert await successor.attach_replica(brief((LEARNER, 0)), learner)
    found = await successor.find_replica(brief((GATEWAY, 0)))
    assert found is not None and found.name == gateway.name
    assert await successor.find_replica(brief((ROLLOUT, 0))) is None
    assert {unit.name for unit in await successor.list_units([])} == {learner.name, gateway.name}
    sky.put(learner.name, status="SUCCEEDED")
    assert not await successor.attach_replica(brief((LEARNER, 0)), learner)
    assert await successor.wait_for_exit(learner) == ExitStatus(0)


async def test_a_successor_gives_up_what_finds_no_machines(
    sky: FakeSky, backend: SkyBackend
) -> None:
    learner, gateway = await group(backend)
    for unit in (learner, gateway):
        sky.put(unit.name, status="PENDING", submitted=True)
    for key in STATIC:
        assert await backend.find_replica(brief(key)) is not None
    for unit in (learner, gateway):
        how = await backend.wait_for_exit(unit)
        assert how == ExitStatus(1, "no such machine is available now", preempted=True)
    assert {job.status for job in sky.table} == {"CANCELLED"}


async def test_a_run_is_clean_when_no_job_and_no_cluster_is_shown(
    sky: FakeSky, backend: SkyBackend
) -> None:
    learner, _ = await group(backend)
    # SkyPilot's server was stopped while it started this cluster: no job knows of it.
    leaked = f"{learner.name}-99"
    sky.machines[leaked] = Cluster(leaked, "UP", managed=True)
    stranger = Cluster("stranger", "UP")
    sky.machines[stranger.name] = stranger
    evidence = await backend.clean_run(sky_launches.RUN_ID)
    assert evidence.gone, evidence.detail
    assert list(sky.machines.values()) == [stranger]
    assert all(job.over for job in sky.table)


async def test_the_reaper_ends_only_what_no_run_owns(
    sky: FakeSky, backend: SkyBackend, tmp_path: Path
) -> None:
    await group(backend)
    other = names.member_name(names.owner_of(tmp_path / "other"), "x", (ROLLOUT, 0))
    orphan = names.member_name(names.owner_of(tmp_path / "runs"), "lost", (ROLLOUT, 0))
    for name in (other, orphan):
        sky.machines[name] = Cluster(name, "UP")
    (found,) = await backend.list_orphan_resources([sky_launches.RUN_ID])
    assert (found.name, found.run_id, found.detail) == (orphan, "", "UP")
    assert orphan in sky.machines
    assert await backend.reap_orphans([sky_launches.RUN_ID]) == [f"{orphan}: ended"]
    assert other in sky.machines and orphan not in sky.machines
    assert not any(job.over for job in sky.table)
    assert await backend.reap_orphans([sky_launches.RUN_ID]) == []


async def test_an_offer_names_machines_and_shows_the_task(backend: SkyBackend) -> None:
    offer = await backend.offer_resources(brief((ROLLOUT, 0)))
    assert offer.resources.startswith("the cheapest of: lambda/us-east-1 H100:1")
    assert "canary" not in offer.task_yaml and "FLOTILLA_TOKEN:" in offer.task_yaml


async def test_clusters_of_their_own_start_end_and_are_taken_down(
    sky: FakeSky, backend: SkyBackend
) -> None:
    unit = await backend.start_replica(brief((ROLLOUT, 0), "cluster"))
    assert unit.name in sky.machines
    ended = asyncio.create_task(backend.wait_for_exit(unit))
    sky.statuses[unit.name] = "SUCCEEDED"
    assert await ended == ExitStatus(0)
    assert sky.machines == {}


async def test_a_cluster_that_is_taken_away_is_an_end(sky: FakeSky, backend: SkyBackend) -> None:
    unit = await backend.start_replica(brief((ROLLOUT, 0), "cluster"))
    ended = asyncio.create_task(backend.wait_for_exit(unit))
    del sky.machines[unit.name]
    assert await ended == ExitStatus(1, "its machine is gone", preempted=True)


async def test_a_cluster_that_was_stopped_is_ended_and_its_replica_begins_elsewhere(
    sky: FakeSky, backend: SkyBackend
) -> None:
    unit = await backend.start_replica(brief((ROLLOUT, 0), "cluster"))
    ended = asyncio.create_task(backend.wait_for_exit(unit))
    sky.stand_still(unit.name, "STOPPED")
    assert await ended == ExitStatus(1, "its machine is gone", preempted=True)
    assert sky.machines == {}


async def test_a_cluster_that_is_out_of_order_for_a_while_is_waited_for(
    sky: FakeSky, backend: SkyBackend
) -> None:
    unit = await backend.start_replica(brief((ROLLOUT, 0), "cluster"))
    ended = asyncio.create_task(backend.wait_for_exit(unit))
    sky.stand_still(unit.name, "INIT")
    await asyncio.sleep(0.2)
    assert not ended.done()
    sky.machines[unit.name] = Cluster(unit.name, "UP")
    sky.statuses[unit.name] = "SUCCEEDED"
    assert await ended == ExitStatus(0)


@pytest.mark.parametrize("status", ["INIT", "UP", "STOPPED"])
async def test_whatever_a_start_of_a_cluster_has_left_can_be_undone(
    sky: FakeSky, backend: SkyBackend, status: str
) -> None:
    wish = brief((ROLLOUT, 0), "cluster")
    sky.refusal = CapacityError("none in us-east-1")
    with pytest.raises(CapacityError):
        await backend.start_replica(wish)
    [name] = sky.machines
    sky.machines[name] = Cluster(name, status)
    await backend.undo_start(wish)
    assert sky.machines == {}


async def test_a_query_after_a_change_gets_no_answer_from_before_it(
    sky: FakeSky, backend: SkyBackend
) -> None:
    board = JobQueue(sky, poll_s=60.0)
    sky.hesitate_s = 0.1
    early = asyncio.create_task(board.recent_jobs())
    await asyncio.sleep(0.02)
    late = asyncio.create_task(board.fresh_jobs())
    await group(backend)
    assert await early == []
    assert len(await board.fresh_jobs()) == 2
    assert await late is not early.result()


async def test_a_launcher_whose_machine_is_renamed_finds_its_own(
    sky: FakeSky, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await SkyBackend(tmp_path / "runs", root, sky, gather_s=0.0).list_units([])
    units = await group(SkyBackend(tmp_path / "runs", root, sky, poll_s=0.02, gather_s=0.05))
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    successor = SkyBackend(tmp_path / "runs", root, sky, poll_s=0.02)
    assert before == [] and set(await successor.list_units([])) == {Unit(u.name) for u in units}


async def test_orphans_are_listed_with_the_run_whose_folder_has_their_mark(
    sky: FakeSky, backend: SkyBackend
) -> None:
    learner, gateway = await group(backend)
    assert await backend.list_orphan_resources([sky_launches.RUN_ID]) == []
    found = {
        orphan.name: (orphan.run_id, orphan.detail)
        for orphan in await backend.list_orphan_resources([])
    }
    assert found[f"job 1 {learner.name}"] == (sky_launches.RUN_ID, "RUNNING")
    assert found[sky.job(gateway.name).cluster] == (sky_launches.RUN_ID, "UP")
    assert len(found) == 4 and len(sky.machines) == 2
