"""The caller of a reap may have lost the ledger; a launcher's own periodic reap has it."""

import asyncio
from pathlib import Path

import pytest

from flotilla_launcher.backends.ports import Backend, BackendError
from flotilla_launcher.control.launcher import Launcher, LauncherDependencies
from flotilla_launcher.state import Cleanup
from flotilla_launcher.store.ledger import Ledger
from tests.faults.launcher_kills.file_cloud import FileCloud
from tests.launcher.control.test_reaper import ended, machine
from tests.support.fake_backend import FakeBackend
from tests.support.launcher import OneRegistry


def not_installed() -> Backend:
    raise BackendError("SkyPilot is not installed")


@pytest.fixture
def store(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "launcher.sqlite")


async def test_a_reap_ends_what_is_at_a_cloud_of_which_the_ledger_knows_nothing(
    tmp_path: Path, store: Ledger
) -> None:
    cloud = FileCloud(tmp_path / "cloud")
    await machine(cloud, "lost-1")
    backends = {"local": FakeBackend, "sky": lambda: cloud}
    launcher = Launcher(tmp_path, store, LauncherDependencies(backends, OneRegistry()))
    shown, _ = await launcher.reap_orphans(dry_run=True)
    assert shown.ended == [
        "lost-1/rollout-0: process 1, belongs to no run that this launcher knows"
    ]
    await launcher.reap_orphans()
    assert not cloud.running()
    cloud.script(unreachable=True)
    found, _ = await launcher.reap_orphans()
    assert found.unreachable == ["sky: nobody answers"]
    store.close()


async def test_where_skypilot_is_not_installed_and_never_was_used_that_is_no_failure(
    tmp_path: Path, store: Ledger
) -> None:
    backends = {"local": FakeBackend, "sky": not_installed}
    launcher = Launcher(tmp_path, store, LauncherDependencies(backends, OneRegistry()))
    found, suspected = await launcher.reap_orphans()
    assert (found.unreachable, suspected) == ([], [])
    store.close()
    used = ended(tmp_path, "old-1", Cleanup.LEAK_SUSPECTED)
    launcher = Launcher(tmp_path, used, LauncherDependencies(backends, OneRegistry()))
    found, suspected = await launcher.reap_orphans()
    assert (found.unreachable, suspected) == (["sky: SkyPilot is not installed"], ["old-1"])
    used.close()


async def test_a_launchers_own_reap_queries_only_where_its_runs_were(
    tmp_path: Path, store: Ledger
) -> None:
    requests: list[str] = []

    def sky() -> Backend:
        requests.append("sky")
        return not_installed()

    local = FakeBackend()
    launcher = Launcher(
        tmp_path, store, LauncherDependencies({"local": lambda: local, "sky": sky}, OneRegistry())
    )
    watch = asyncio.create_task(launcher.watch_for_orphans())
    await asyncio.sleep(0.2)
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    assert requests == []
    await launcher.reap_orphans()
    assert requests == ["sky"]
    store.close()
