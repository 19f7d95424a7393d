"""The machine backend on the SkyPilot of the tests; tests/sky has the real one."""

import asyncio
import socket
from pathlib import Path

import pytest

from flotilla_launcher.agent_protocol import EXIT_PREEMPTED, UnitPhase, UnitReport
from flotilla_launcher.backends.ports import BackendError, BackendUnreachable
from flotilla_launcher.backends.sky import names
from flotilla_launcher.backends.sky.backend import SkyBackend
from flotilla_launcher.backends.sky.sdk import SkyClient
from flotilla_launcher.security.sealed_secrets import KEY_FILE, unseal_secrets
from flotilla_launcher.state import GATEWAY, LEARNER, ROLLOUT, ExitStatus, Unit
from tests.launcher.backends.sky.starting import brief, start_all, until_answered
from tests.support import sky_launches
from tests.support.skypilot.server import Server
from tests.support.skypilot.state import Script

_GONE = ExitStatus(1, "its machine is gone", preempted=True)


async def test_each_replica_has_a_cluster_of_its_own_with_its_secrets_and_the_code(
    sky: Server, backend: SkyBackend
) -> None:
    units = await start_all(backend)
    assert {unit.name for unit in units} == set(sky.state.machines)
    for document in sky.launched:
        unseal_secrets(opened := dict(document["secrets"]), Path(document["workdir"]) / KEY_FILE)
        assert opened["FLOTILLA_TOKEN"] == "canary-token"
        assert document["workdir"].endswith(f"{sky_launches.RUN_ID}/code")


@pytest.mark.parametrize(
    ("code", "how"), [(0, ExitStatus(0)), (3, ExitStatus(1, "FAILED"))], ids=["done", "failed"]
)
async def test_a_replica_ends_as_its_job_does_and_its_machine_with_it(
    sky: Server, backend: SkyBackend, code: int, how: ExitStatus
) -> None:
    unit = await backend.start_replica(brief((ROLLOUT, 0)))
    ended = asyncio.create_task(backend.wait_for_exit(unit))
    await asyncio.sleep(0.1)
    assert not ended.done()
    sky.finish(unit.name, code)
    assert await ended == how
    assert sky.state.machines == {}


async def test_a_replica_that_is_killed_has_ended_and_can_be_started_again(
    sky: Server, backend: SkyBackend
) -> None:
    learner, _, unit = await start_all(backend)
    await backend.kill_replica(unit)
    assert await backend.wait_for_exit(unit) == ExitStatus(-9)
    assert learner.name in sky.state.machines
    again = await backend.start_replica(brief((ROLLOUT, 0)))
    assert again.name == unit.name
    # The end of the first start does not end the second.
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(backend.wait_for_exit(again), 0.3)


async def test_a_server_that_is_away_ends_nothing(sky: Server, backend: SkyBackend) -> None:
    learner, *_ = await start_all(backend)
    sky.away = True
    for query in (
        backend.wait_for_exit(learner),
        backend.clean_run(sky_launches.RUN_ID),
        backend.reap_orphans([]),
    ):
        with pytest.raises(BackendUnreachable):
            await query
    sky.away = False
    assert len(sky.state.machines) == 3


async def test_a_successor_finds_what_runs_by_name(
    sky: Server, backend: SkyBackend, client: SkyClient, tmp_path: Path, root: Path
) -> None:
    learner = await backend.start_replica(brief((LEARNER, 0)))
    gateway = await backend.start_replica(brief((GATEWAY, 0)))
    successor = SkyBackend(tmp_path / "runs", root, client, poll_s=0.02, silent_s=0.0)
    assert await successor.attach_replica(brief((LEARNER, 0)), learner)
    found = await successor.find_replica(brief((GATEWAY, 0)))
    assert found is not None and found.name == gateway.name
    assert await successor.find_replica(brief((ROLLOUT, 0))) is None
    assert {unit.name for unit in await successor.list_units([])} == {learner.name, gateway.name}
    sky.finish(learner.name)
    assert not await successor.attach_replica(brief((LEARNER, 0)), learner)
    assert await successor.wait_for_exit(learner) == ExitStatus(0)


async def test_a_run_is_clean_when_no_cluster_is_shown(sky: Server, backend: SkyBackend) -> None:
    learner, *_ = await start_all(backend)
    # SkyPilot's server was stopped while it started this one.
    sky.leak(f"{learner.name}-99")
    sky.leak("stranger")
    evidence = await backend.clean_run(sky_launches.RUN_ID)
    assert evidence.gone, evidence.detail
    assert list(sky.state.machines) == ["stranger"]


async def test_the_reaper_ends_only_what_no_run_owns(
    sky: Server, backend: SkyBackend, tmp_path: Path
) -> None:
    units = await start_all(backend)
    other = names.member_name(names.owner_of(tmp_path / "other"), "x", (ROLLOUT, 0))
    orphan = names.member_name(names.owner_of(tmp_path / "runs"), "lost", (ROLLOUT, 0))
    for name in (other, orphan):
        sky.leak(name)
    (found,) = await backend.list_orphan_resources([sky_launches.RUN_ID])
    assert (found.name, found.run_id, found.detail) == (orphan, "", "UP")
    assert orphan in sky.state.machines
    assert await backend.reap_orphans([sky_launches.RUN_ID]) == [f"{orphan}: ended"]
    assert set(sky.state.machines) == {other, *(unit.name for unit in units)}
    assert await backend.reap_orphans([sky_launches.RUN_ID]) == []


async def test_orphans_are_listed_with_the_run_whose_folder_has_their_mark(
    sky: Server, backend: SkyBackend
) -> None:
    units = await start_all(backend)
    assert await backend.list_orphan_resources([sky_launches.RUN_ID]) == []
    found = {each.name: each.run_id for each in await backend.list_orphan_resources([])}
    assert found == {unit.name: sky_launches.RUN_ID for unit in units}
    assert len(sky.state.machines) == 3


async def test_an_offer_names_machines_and_shows_the_task(backend: SkyBackend) -> None:
    offer = await backend.offer_resources(brief((ROLLOUT, 0)))
    assert offer.resources.startswith("the cheapest of: lambda/us-east-1 H100:1")
    assert "canary" not in offer.task_yaml and "FLOTILLA_TOKEN:" in offer.task_yaml


async def test_a_machine_that_is_taken_away_is_an_end(sky: Server, backend: SkyBackend) -> None:
    unit = await backend.start_replica(brief((ROLLOUT, 0)))
    ended = asyncio.create_task(backend.wait_for_exit(unit))
    sky.preempt(unit.name)
    assert await ended == _GONE


async def test_a_machine_that_was_stopped_is_ended_and_its_replica_begins_elsewhere(
    sky: Server, backend: SkyBackend
) -> None:
    unit = await backend.start_replica(brief((ROLLOUT, 0)))
    ended = asyncio.create_task(backend.wait_for_exit(unit))
    sky.state.clusters[unit.name].status = "STOPPED"
    assert await ended == _GONE
    assert sky.state.machines == {}


async def test_a_machine_that_is_out_of_order_for_a_while_is_waited_for(
    sky: Server, backend: SkyBackend
) -> None:
    unit = await backend.start_replica(brief((ROLLOUT, 0)))
    ended = asyncio.create_task(until_answered(lambda: backend.wait_for_exit(unit)))
    sky.state.clusters[unit.name].status = "INIT"
    await asyncio.sleep(0.2)
    assert not ended.done()
    sky.state.clusters[unit.name].status = "UP"
    sky.finish(unit.name)
    assert await ended == ExitStatus(0)


@pytest.mark.parametrize("status", ["INIT", "UP", "STOPPED"])
async def test_whatever_a_start_has_left_can_be_undone(
    sky: Server, backend: SkyBackend, status: str
) -> None:
    wish = brief((ROLLOUT, 0))
    sky.script = Script(no_login=True)
    with pytest.raises(BackendError):
        await backend.start_replica(wish)
    [name] = sky.state.machines
    sky.state.clusters[name].status = status
    await backend.undo_start(wish)
    assert sky.state.machines == {}


async def test_a_launcher_whose_machine_is_renamed_finds_its_own(
    backend: SkyBackend,
    client: SkyClient,
    tmp_path: Path,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await backend.list_units([]) == []
    units = await start_all(backend)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    successor = SkyBackend(tmp_path / "runs", root, client, poll_s=0.02)
    assert set(await successor.list_units([])) == {Unit(u.name) for u in units}


async def test_skypilot_is_asked_only_about_machines_that_fell_silent(
    sky: Server, client: SkyClient, tmp_path: Path, root: Path
) -> None:
    backend = SkyBackend(tmp_path / "runs", root, client, poll_s=0.02, silent_s=0.5)
    learner, gateway, rollout = await start_all(backend)
    ends = [asyncio.create_task(backend.wait_for_exit(unit)) for unit in (learner, rollout)]
    running = UnitReport(UnitPhase.RUNNING)
    for _ in range(10):
        backend.note_report(learner, 0, running)
        await asyncio.sleep(0.1)
    looks = sky.state.looks
    assert learner.name not in looks and gateway.name not in looks and looks[rollout.name] > 0
    # Its own report of an exit needs no patience.
    sky.finish(learner.name)
    backend.note_report(learner, 0, UnitReport(UnitPhase.EXITED, ExitStatus(0)))
    assert await asyncio.wait_for(ends[0], 0.4) == ExitStatus(0)
    ends[1].cancel()


async def test_each_of_a_replicas_machines_may_fall_silent(
    sky: Server, client: SkyClient, tmp_path: Path, root: Path
) -> None:
    backend = SkyBackend(tmp_path / "runs", root, client, poll_s=0.02, silent_s=0.5)
    unit = await backend.start_replica(brief((LEARNER, 0)))
    ended = asyncio.create_task(backend.wait_for_exit(unit))
    backend.note_report(unit, 1, UnitReport(UnitPhase.RUNNING))
    for _ in range(10):
        backend.note_report(unit, 0, UnitReport(UnitPhase.RUNNING))
        await asyncio.sleep(0.1)
    assert sky.state.looks[unit.name] > 0
    ended.cancel()


@pytest.mark.parametrize("noticed", [True, False])
async def test_the_place_of_a_machine_that_was_lost_is_tried_last(
    sky: Server, backend: SkyBackend, noticed: bool
) -> None:
    wish = brief((ROLLOUT, 0))
    unit = await backend.start_replica(wish)
    assert sky.state.infras[unit.name] == ["lambda/us-east-1"]
    await backend.price_per_hour(wish)
    if noticed:
        farewell = UnitReport(UnitPhase.EXITED, ExitStatus(EXIT_PREEMPTED))
        backend.note_report(unit, 0, farewell)
        sky.finish(unit.name, EXIT_PREEMPTED)
    else:
        sky.preempt(unit.name)
    await backend.wait_for_exit(unit)
    await backend.start_replica(wish)
    ordered = [each["infra"] for each in sky.launched[-1]["resources"]["ordered"]]
    assert ordered == ["lambda/us-west-1", "lambda/us-east-1"]
    # A second loss counts in place of the first.
    await backend.price_per_hour(wish)
    sky.preempt(unit.name)
    await backend.wait_for_exit(unit)
    await backend.start_replica(wish)
    ordered = [each["infra"] for each in sky.launched[-1]["resources"]["ordered"]]
    assert ordered == ["lambda/us-east-1", "lambda/us-west-1"]
