"""Commands that are run to their end, and what they leave behind."""

import asyncio
import sys
import time
from asyncio.subprocess import STDOUT
from pathlib import Path

import psutil
import pytest

from flotilla_common.process.run_child import run_child
from tests.support.waiting import until

_ECHO = "import sys; print(sys.stdin.read()); print('no', file=sys.stderr); sys.exit(3)"
# Starts a process of its own, whose number it prints.
_PARENT = """
import subprocess, sys, time
pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], **pipes)
open(sys.argv[1], "w").write(str(child.pid))
print(child.pid, flush=True)
time.sleep(float(sys.argv[2]))
"""


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_a_command_reads_its_input_and_its_output_is_returned() -> None:
    done = await run_child((sys.executable, "-c", _ECHO), b"a question", env={})
    assert done == (3, b"a question\n", b"no\n")
    done = await run_child((sys.executable, "-c", _ECHO), b"", env={}, stderr=STDOUT)
    assert (done.code, done.errors) == (3, b"")
    assert sorted(done.output.split()) == [b"no"]


async def test_what_a_command_leaves_behind_is_killed(tmp_path: Path) -> None:
    command = (sys.executable, "-c", _PARENT, str(tmp_path / "pid"), "0")
    done = await run_child(command, env={})
    assert done.code == 0
    await until(lambda: is_gone(int(done.output)), 60.0)


@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_command_that_takes_too_long_ends_with_all_that_it_started(
    tmp_path: Path, cancelled: bool
) -> None:
    noted = tmp_path / "pid"
    command = (sys.executable, "-c", _PARENT, str(noted), "600")
    seconds = 60.0 if cancelled else 5.0
    running = asyncio.create_task(run_child(command, env={}, seconds=seconds))
    await until(lambda: noted.exists() and bool(noted.read_text()), 60.0)
    if cancelled:
        running.cancel()
    with pytest.raises(asyncio.CancelledError if cancelled else TimeoutError):
        await running
    await until(lambda: is_gone(int(noted.read_text())), 60.0)


async def test_a_command_whose_start_is_cancelled_ends_with_all_that_it_started(
    tmp_path: Path,
) -> None:
    noted = tmp_path / "pid"
    command = (sys.executable, "-c", _PARENT, str(noted), "600")
    running = asyncio.create_task(run_child(command, env={}))
    # It is started at the second turn of the loop, which then waits for its pipes.
    for _ in range(2):
        await asyncio.sleep(0)
    while not (noted.exists() and noted.read_text()):
        # The loop does not turn meanwhile.
        time.sleep(0.01)  # noqa: ASYNC251
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: is_gone(int(noted.read_text())), 60.0)
