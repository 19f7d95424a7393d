"""Leaks of a cloud's machines, on the backend for machines without a launcher around
it. The emulated cloud's own list is what costs money."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flotilla_launcher.backends.ports import BackendUnreachable, CapacityError, LaunchSpec
from flotilla_launcher.backends.sky.backend import SkyBackend
from flotilla_launcher.backends.sky.sdk import SkyClient
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.state import ROLLOUT
from tests.sky.box.layout import LOGIN, ROOT
from tests.sky.rented import gpu, spec
from tests.sky.session import SkySession
from tests.support.run_specs import bare_spec
from tests.support.waiting import until

pytestmark = [
    pytest.mark.sky,
    pytest.mark.timeout(1800),
    # SkyPilot uses deprecated parts of its own dependencies.
    pytest.mark.filterwarnings("ignore"),
]
_RUN_ID = "leak-20260101-000000"
_SECRETS = {"FLOTILLA_TOKEN": "canary-token", "FLOTILLA_TLS": "canary-tls"}
_LIMIT_S = 600.0


@pytest.fixture(autouse=True)
def as_it_was(sky_session: SkySession) -> Iterator[None]:
    yield
    assert sky_session.cloud.put_right() == []


@pytest.fixture
def backend(sky_session: SkySession, tmp_path: Path) -> SkyBackend:
    (tmp_path / "runs").mkdir()
    return SkyBackend(tmp_path / "runs", ROOT, SkyClient(), poll_s=3.0)


def launch(session: SkySession, tmp_path: Path, **changes: Any) -> LaunchSpec:
    """A replica with a machine of its own, on the first of two regions that has one."""
    sky = {
        "setup": "true",
        "python": "tests/sky/replica.sh",
        "commit": "HEAD",
        "idle_minutes": 1,
        "rollout": {"ordered": [gpu("us-east-1"), gpu("us-west-1")]},
    }
    whole = {"backend": "sky", "max_hours": 0.5, "sky": sky}
    values: dict[str, Any] = {
        "spec": bare_spec({}, LauncherConfig.model_validate(whole)),
        "registry": f"{session.layout.address(LOGIN)}:4000",
        **changes,
    }
    return LaunchSpec(_RUN_ID, (ROLLOUT, 0), (), _SECRETS, tmp_path / "rollout.log", **values)


async def test_only_when_no_candidate_has_a_machine_there_is_no_capacity(
    sky_session: SkySession, backend: SkyBackend, tmp_path: Path
) -> None:
    cloud = sky_session.cloud
    cloud.set_capacity(0)
    with pytest.raises(CapacityError, match="us-east-1"):
        await backend.start_replica(launch(sky_session, tmp_path))
    assert cloud.machines() == []
    cloud.set_capacity(1, "us-west-1")
    unit = await backend.start_replica(launch(sky_session, tmp_path, attempt=2))
    [machine] = cloud.machines()
    assert machine["region"] == {"name": "us-west-1"}
    await backend.kill_replica(unit)
    assert cloud.machines() == []
    assert (await backend.clean_run(_RUN_ID)).gone


async def test_what_boots_while_the_api_server_stops_is_kept_until_it_answers_and_then_reaped(
    sky_session: SkySession, backend: SkyBackend, tmp_path: Path
) -> None:
    cloud, wish = sky_session.cloud, launch(sky_session, tmp_path)
    cloud.set_boot_delay(30)
    starting = asyncio.create_task(backend.start_replica(wish))
    await until(lambda: len(cloud.machines()) == 1, _LIMIT_S)
    await asyncio.to_thread(sky_session.api.stop)
    with pytest.raises(BackendUnreachable):
        await starting
    for query in (
        backend.find_replica(wish),
        backend.clean_run(_RUN_ID),
        backend.reap_orphans([]),
        backend.list_orphan_resources([]),
    ):
        with pytest.raises(BackendUnreachable):
            await query
    assert len(cloud.machines()) == 1
    await asyncio.to_thread(sky_session.api.start)
    successor = SkyBackend(tmp_path / "runs", ROOT, SkyClient(), poll_s=3.0)
    # A machine of an active run is no orphan, even if SkyPilot does not know it.
    assert await successor.reap_orphans([_RUN_ID]) == []
    assert len(cloud.machines()) == 1
    assert len(await successor.list_orphan_resources([])) == 1
    assert len(await successor.reap_orphans([])) == 1
    assert cloud.machines() == []
    assert (await successor.clean_run(_RUN_ID)).gone


async def test_a_machine_that_cannot_reach_its_cloud_is_reaped_once_the_cloud_answers(
    sky_session: SkySession, backend: SkyBackend, tmp_path: Path
) -> None:
    """Its launcher is dead, its work has ended, and it takes itself down in a minute."""
    cloud, wish = sky_session.cloud, launch(sky_session, tmp_path)
    unit = await backend.start_replica(wish)
    [machine] = cloud.machines()
    cloud.set_broken(True)
    (cloud.files_of(machine["id"]) / "home/ubuntu/sky_workdir/work-is-done").touch()
    await until(lambda: cloud.failed(machine["ip"]) > 0, _LIMIT_S)
    evidence = await _looked(lambda: backend.clean_run(_RUN_ID))
    assert evidence is None or not evidence.gone
    assert [left["id"] for left in cloud.machines()] == [machine["id"]]
    cloud.set_broken(False)
    assert any(unit.name in text for text in await backend.reap_orphans([]))
    assert cloud.machines() == []
    assert (await backend.clean_run(_RUN_ID)).gone


async def _looked(query: Callable[[], Any]) -> Any:
    """Return the findings; None if the cloud cannot be reached."""
    try:
        return await query()
    except BackendUnreachable:
        return None


async def test_a_machine_that_skypilot_has_forgotten_is_ended_at_its_cloud(
    sky_session: SkySession, backend: SkyBackend, tmp_path: Path
) -> None:
    cloud, api = sky_session.cloud, sky_session.api
    (tmp_path / "runs" / _RUN_ID).mkdir()
    (tmp_path / "runs" / _RUN_ID / "spec.json").write_text(spec(sky_session))
    await backend.start_replica(launch(sky_session, tmp_path))
    [machine] = cloud.machines()
    await asyncio.to_thread(api.stop)
    for file in (sky_session.layout.client / ".sky").glob("state.db*"):
        file.unlink()
    await asyncio.to_thread(api.start)
    assert await SkyClient().list_clusters() == []
    [orphan] = await backend.list_orphan_resources([])
    assert orphan.name == f"machine {machine['id']} {machine['name']}"
    [message] = await backend.reap_orphans([])
    assert "ended at lambda, for SkyPilot had forgotten it" in message
    assert cloud.machines() == []
    assert (await backend.clean_run(_RUN_ID)).gone
