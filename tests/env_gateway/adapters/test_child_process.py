"""Child processes and all that they start, in process namespaces and below a reaper."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.process.python_command import python_command
from flotilla_env_gateway.adapters import child_process
from flotilla_env_gateway.adapters.child_process import ChildProcess
from tests.env_gateway.adapters.process_modes import MODES, use_mode
from tests.support.marked_processes import Mark
from tests.support.repository import ROOT
from tests.support.started_process import start_beside

# Starts a process in a session of its own, says so, and reads until its input ends.
_STARTING = (
    "import subprocess, sys\n"
    "subprocess.Popen(['sleep', '86400'], start_new_session=True, stdin=subprocess.DEVNULL,\n"
    "                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
    "print('started', flush=True)\n"
)
_GATEWAY = """
import asyncio, sys
from flotilla_env_gateway.adapters import process_namespace
from flotilla_env_gateway.adapters.child_process import ChildProcess

if sys.argv[1] == "reaper":
    process_namespace.find_bubblewrap = lambda: None

async def main():
    child = await ChildProcess.start(sys.argv[2:], {})
    await child.stdout.readline()
    print("started", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    use_mode(request.param, monkeypatch)
    return request.param


def program(then: str = "sys.stdin.read()") -> tuple[str, ...]:
    return (sys.executable, "-c", f"{_STARTING}{then}")


async def start(mark: Mark, *command: str) -> ChildProcess:
    child = await ChildProcess.start(command, mark.environment)
    assert await child.stdout.readline() == b"started\n"
    return child


@pytest.mark.usefixtures("mode")
async def test_nothing_that_a_command_started_is_left_once_it_is_closed() -> None:
    mark = Mark()
    children = await asyncio.gather(*(start(mark, *program()) for _ in range(20)))
    await mark.wait_for("sleep 86400", 20)
    await asyncio.gather(*(child.close() for child in children))
    assert mark.find_commands() == []


@pytest.mark.usefixtures("mode")
async def test_what_a_command_started_ends_as_soon_as_the_command_does() -> None:
    mark = Mark()
    child = await start(mark, *program("sys.exit(3)"))
    await mark.wait_for_none()
    assert await child.describe_end() == "it ended with code 3"
    await child.close()


async def test_all_ends_with_a_gateway_that_is_killed(mode: str) -> None:
    mark = Mark()
    command = python_command("-c", _GATEWAY, mode, *program("import time; time.sleep(86400)"))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/gen", **mark.environment}
    gateway, line = await start_beside(command, env=environment)
    assert line == "started\n"
    await mark.wait_for("sleep 86400", 1)
    gateway.kill()
    await gateway.wait()
    await mark.wait_for_none()


@pytest.mark.usefixtures("mode")
async def test_a_command_may_end_in_order(tmp_path: Path) -> None:
    mark, last = Mark(), tmp_path / "last"
    ending = (
        "import signal, time\n"
        f"end = lambda *_: (open({str(last)!r}, 'w').close(), sys.exit())\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('ready', flush=True)\n"
        "time.sleep(86400)"
    )
    child = await start(mark, *program(ending))
    assert await child.stdout.readline() == b"ready\n"
    await child.close()
    assert last.exists() and mark.find_commands() == []


@pytest.mark.usefixtures("mode")
async def test_a_command_that_will_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "_GRACE_S", 0.2)
    mark = Mark()
    stubborn = (
        "import signal\n"
        "for number in (signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)\n"
        "while True: print(flush=True)"
    )
    child = await start(mark, *program(stubborn))
    async with asyncio.timeout(10.0):
        await child.close()
        await child.close()
    assert mark.find_commands() == []


@pytest.mark.usefixtures("mode")
async def test_killing_does_not_wait_for_the_command() -> None:
    mark = Mark()
    child = await start(mark, *program("import time; time.sleep(86400)"))
    child.kill()
    child.kill()
    await child.close()
    assert mark.find_commands() == [] and child.returncode not in (None, 0)


@pytest.mark.usefixtures("mode")
async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    mark = Mark()
    for number in range(10):
        starting = asyncio.create_task(ChildProcess.start(program(), mark.environment))
        await asyncio.sleep(0.01 * number)
        starting.cancel()
        [outcome] = await asyncio.gather(starting, return_exceptions=True)
        if isinstance(outcome, ChildProcess):
            await outcome.close()
    await mark.wait_for_none()


@pytest.mark.usefixtures("mode")
async def test_a_start_that_is_cancelled_once_the_command_runs_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mark = Mark()
    loop = asyncio.get_running_loop()
    connect, running = loop.connect_write_pipe, asyncio.Event()

    async def connect_once_it_runs(*args: Any) -> Any:
        await mark.wait_for("sleep 86400", 1)
        running.set()
        await asyncio.sleep(0.05)
        return await connect(*args)

    monkeypatch.setattr(loop, "connect_write_pipe", connect_once_it_runs)
    starting = asyncio.create_task(ChildProcess.start(program(), mark.environment))
    await running.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await mark.wait_for_none()


@pytest.mark.usefixtures("mode")
async def test_a_program_that_is_missing_is_named() -> None:
    child = await ChildProcess.start(("no-such-program", "x"), {})
    assert "no-such-program: No such file or directory" in await child.describe_end()
    await child.close()


async def test_the_death_of_a_reaper_takes_the_command_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_mode("reaper", monkeypatch)
    mark = Mark()
    child = await ChildProcess.start(("sleep", "86400"), mark.environment)
    await mark.wait_for("sleep 86400", 2)
    os.kill(child.pid, signal.SIGKILL)
    await mark.wait_for_none()
    await child.close()


async def test_a_command_keeps_the_rights_of_the_gateway() -> None:
    child = await ChildProcess.start(("grep", "CapEff", "/proc/self/status"), {})
    rights = (await child.stdout.readline()).decode()
    await child.close()
    with open("/proc/self/status") as status:  # noqa: ASYNC230 (no file of a disk)
        assert rights in status.read()
