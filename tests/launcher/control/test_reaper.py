"""Resources that belong to no run are listed and ended, and no others are."""

import asyncio
import os
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from flotilla_launcher.api import codec
from flotilla_launcher.backends.local.marked_processes import MARK_VARIABLE
from flotilla_launcher.backends.ports import LaunchSpec
from flotilla_launcher.cli import launcher_client
from flotilla_launcher.control import reaper
from flotilla_launcher.control.launcher import Launcher, LauncherDependencies
from flotilla_launcher.state import ROLLOUT, SUSPECTED_FOR_S, Cleanup, Run, RunState, Unit
from flotilla_launcher.store.ledger import Ledger
from tests.faults.launcher_kills.file_cloud import FileCloud
from tests.support.fake_backend import FakeBackend
from tests.support.launcher import OneRegistry, start_cli
from tests.support.launcher_process import start_launcher
from tests.support.waiting import until


def ended(folder: Path, run_id: str, cleanup: Cleanup = Cleanup.VERIFIED) -> Ledger:
    """A ledger with one ended run on a cloud."""
    store = Ledger(folder / "launcher.sqlite")
    run = Run(run_id, "old", {}, backend="sky", state=RunState.STOPPED, cleanup=cleanup)
    store.begin_run(run, "{}", 1.0, {})
    store.save_run(run, [], 2.0)
    return store


async def machine(cloud: FileCloud, run_id: str) -> None:
    await cloud.start_replica(LaunchSpec(run_id, (ROLLOUT, 0), (), {}, Path("unused.log")))


async def until_empty(cloud: FileCloud) -> None:
    await until(lambda: not cloud.running())


async def test_a_launcher_ends_at_its_start_what_an_ended_run_left_at_a_cloud(
    tmp_path: Path,
) -> None:
    store, cloud = ended(tmp_path, "old-1"), FileCloud(tmp_path / "cloud")
    await machine(cloud, "old-1")
    backends = {"local": FakeBackend, "sky": lambda: cloud}
    launcher = Launcher(tmp_path, store, LauncherDependencies(backends, OneRegistry()))
    watch = asyncio.create_task(launcher.watch_for_orphans())
    await asyncio.wait_for(until_empty(cloud), 5.0)
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    store.close()


@pytest.mark.parametrize("age_s", [60.0, SUSPECTED_FOR_S + 60.0])
async def test_a_launcher_stays_for_a_day_while_a_run_may_have_left_something(
    tmp_path: Path, age_s: float
) -> None:
    store, cloud = Ledger(tmp_path / "launcher.sqlite"), FileCloud(tmp_path / "cloud")
    run = Run("old-1", "old", {}, backend="sky", cleanup=Cleanup.LEAK_SUSPECTED)
    run = replace(run, state=RunState.COMPLETED)
    store.begin_run(run, "{}", time.time() - age_s, {})
    store.save_run(run, [], time.time() - age_s)
    backends = {"local": FakeBackend, "sky": lambda: cloud}
    launcher = Launcher(tmp_path, store, LauncherDependencies(backends, OneRegistry()))
    recent = age_s < SUSPECTED_FOR_S
    assert launcher.is_idle is not recent
    answer = codec.run_to_pb(store.list_newest()[0], tmp_path, brief=True)
    assert launcher_client.needs_launcher(answer) is recent
    await launcher.reap_orphans()
    assert launcher.is_idle, "it has looked again, and nothing is there"
    assert not launcher_client.needs_launcher(
        codec.run_to_pb(store.list_newest()[0], tmp_path, brief=True)
    )
    store.close()


async def test_a_run_whose_spec_is_unreadable_is_looked_for_and_cleared(
    tmp_path: Path,
) -> None:
    store, cloud = Ledger(tmp_path / "launcher.sqlite"), FileCloud(tmp_path / "cloud")
    run = Run("old-1", "old", {}, backend="sky", state=RunState.RUNNING)
    store.begin_run(run, '{"launcher": {"of_another_version": 1}}', 1.0, {})
    store.save_run(run, [], None)
    await machine(cloud, "old-1")
    backends = {"local": FakeBackend, "sky": lambda: cloud}
    launcher = Launcher(tmp_path, store, LauncherDependencies(backends, OneRegistry()))
    await launcher.recover_runs()
    [suspected] = store.list_suspects("sky")
    assert (suspected.run.run_id, suspected.run.state) == ("old-1", RunState.FAILED)
    assert "cannot read its spec" in suspected.run.error
    await launcher.reap_orphans()
    await asyncio.wait_for(until_empty(cloud), 5.0)
    await launcher.reap_orphans()
    assert store.list_suspects("sky") == []
    store.close()


async def test_a_dry_run_names_each_orphan_and_why_and_ends_none(tmp_path: Path) -> None:
    store, cloud = ended(tmp_path, "old-1"), FileCloud(tmp_path / "cloud")
    for run_id in ("old-1", "lost-2", "active-3"):
        await machine(cloud, run_id)
    found = await reaper.look_for_orphans("sky", cloud, store, ["active-3"])
    assert found.ended == [
        "lost-2/rollout-0: process 1, belongs to no run that this launcher knows",
        "old-1/rollout-0: process 1, belongs to run old-1, which is stopped",
    ]
    assert len(cloud.running()) == 3
    cloud.script(unreachable=True)
    found = await reaper.look_for_orphans("sky", cloud, store, [])
    assert (found.ended, found.unreachable) == ([], ["sky: nobody answers"])
    store.close()


class Beginning(FakeBackend):
    """Begins a run while the reaper looks."""

    def __init__(self, active: list[str]) -> None:
        super().__init__()
        self._active = active

    async def reap_orphans(self, active: Collection[str]) -> list[str]:
        self._active.append("new-1")
        self.left.append(Unit("new-1/rollout-0"))
        return [orphan.name for orphan in await self.list_orphan_resources(active)]


async def test_a_run_that_is_begun_while_orphans_are_looked_for_is_none(tmp_path: Path) -> None:
    store, active = ended(tmp_path, "old-1"), list[str]()
    found = await reaper.reap_backend("sky", Beginning(active), store, active)
    assert found.ended == []
    store.close()


async def test_a_resumed_run_is_not_cleaned_for_an_earlier_suspicion(tmp_path: Path) -> None:
    store, backend = ended(tmp_path, "old-1", Cleanup.LEAK_SUSPECTED), FakeBackend()
    found = await reaper.reap_backend("sky", backend, store, ["old-1"])
    assert (found.cleared, backend.cleaned) == ([], [])
    assert (await reaper.reap_backend("sky", backend, store, [])).cleared == ["old-1"]
    assert store.list_suspects("sky") == []
    store.close()


async def _reap(runs: Path, *options: str) -> tuple[int | None, str]:
    process = await start_cli("reap", "--runs", str(runs), *options, forged=True)
    output, _ = await process.communicate()
    return process.returncode, output.decode()


async def test_flotilla_reap_lists_an_orphan_process_first_and_then_ends_it(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    code, output = await _reap(runs, "--dry-run")
    assert code == 1 and "no launcher is running" in output
    runs.mkdir()
    launcher = await start_launcher(runs)
    try:
        marked = {**os.environ, MARK_VARIABLE: f"{runs}:lost-1/rollout-0#ab"}
        orphan = await asyncio.create_subprocess_exec("sleep", "60", env=marked)
        code, output = await _reap(runs, "--dry-run")
        why = f"process {orphan.pid}, belongs to no run that this launcher knows"
        assert (code, output) == (0, f"would end lost-1/rollout-0#ab: {why}\n")
        assert orphan.returncode is None
        assert await _reap(runs) == (0, "ended lost-1/rollout-0#ab\n")
        assert await orphan.wait() == -9
    finally:
        launcher.terminate()
        await asyncio.wait_for(launcher.wait(), 20)
