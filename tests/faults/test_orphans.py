"""Unmarked leftovers of a killed replica are found by the next launcher."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil

from flotilla_launcher.backends.local.backend import LocalBackend
from flotilla_launcher.backends.ports import LaunchSpec
from tests.faults.harness import runs

# A child that shows nothing of its origin, as an engine process that has named itself.
COMMAND = ("sh", "-c", "env -i sleep 300 & wait")


async def test_a_child_without_a_mark_is_ended_after_its_leader_and_launcher_were_killed(
    tmp_path: Path,
) -> None:
    launch = LaunchSpec(
        run_id="run",
        key=("rollout", 0),
        command=COMMAND,
        secrets={},
        log=tmp_path / "log",
    )
    unit = await LocalBackend(tmp_path).start_replica(launch)
    leader = psutil.Process(unit.pid)
    await _until(lambda: bool(leader.children()))
    children = leader.children()
    os.kill(unit.pid, signal.SIGKILL)
    await _until(lambda: not psutil.pid_exists(unit.pid))
    heir = LocalBackend(tmp_path)
    assert await heir.list_units([unit]) == [unit]
    await heir.end_orphan(unit, 0.0)
    assert not any(map(runs, children))
    assert await heir.list_units([unit]) == []


async def _until(reached: Callable[[], bool]) -> None:
    for _ in range(500):
        if reached():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("waited 5 s in vain")
