"""Processes that another launcher has left, and processes that belong to no launcher."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from flotilla_launcher.backends.local.backend import LocalBackend
from flotilla_launcher.backends.local.marked_processes import MARK_VARIABLE
from flotilla_launcher.backends.ports import LaunchSpec
from flotilla_launcher.state import Unit


async def test_an_orphan_is_found_by_its_mark_alone_and_ended_with_its_children(
    tmp_path: Path,
) -> None:
    dead = LocalBackend(tmp_path)
    sleeper = "import subprocess, time; subprocess.Popen(['sleep', '300']); time.sleep(300)"
    launch = LaunchSpec(
        "run-1", ("rollout", 0), (sys.executable, "-c", sleeper), {}, tmp_path / "log"
    )
    unit = await dead.start_replica(launch)
    await asyncio.sleep(0.3)
    heir = LocalBackend(tmp_path)
    [found] = await heir.list_units([])
    assert found.name == unit.name
    assert found.pid == unit.pid
    await heir.end_orphan(found, 2.0)
    assert await heir.list_units([unit]) == []
    assert (await dead.wait_for_exit(unit)).code == -15


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees the environments of others")
async def test_a_strangers_process_with_a_mark_of_ours_is_left_alone(tmp_path: Path) -> None:
    mark = {MARK_VARIABLE: f"{tmp_path}:run-1/rollout-0#1"}
    stranger = await asyncio.create_subprocess_exec("sleep", "300", env=mark, user=63_999)
    backend = LocalBackend(tmp_path)
    launch = LaunchSpec("run-1", ("rollout", 0), ("true",), {}, tmp_path / "log")
    try:
        assert await backend.find_replica(launch) is None
        assert await backend.list_orphan_resources([]) == await backend.list_units([]) == []
        assert await backend.reap_orphans([]) == []
        assert (await backend.clean_run("run-1")).gone
        assert stranger.returncode is None
    finally:
        stranger.kill()
        await stranger.wait()


async def test_a_pid_that_is_another_process_by_now_is_left_alone(tmp_path: Path) -> None:
    other = await asyncio.create_subprocess_exec("sleep", "300", start_new_session=True)
    backend = LocalBackend(tmp_path)
    stale = Unit("run-1/rollout-0#1", other.pid, started=1.0)
    assert await backend.list_units([stale]) == []
    await backend.end_orphan(stale, 0.1)
    await backend.kill_replica(stale)
    assert other.returncode is None
    other.kill()
    await other.wait()
