"""Following a run, leaving it, and the end of the terminal."""

import asyncio
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flotilla_launcher.security import launcher_address
from flotilla_launcher.state import RunState
from flotilla_launcher.store.ledger import Ledger, StoredRun
from tests.launcher.cli.test_app import nothing_left, read_until, write_spec
from tests.support.launcher import forged_fakes, start_cli
from tests.support.repository import ROOT
from tests.support.waiting import until

LIMIT_S = 60.0
ENDLESS = {"steps": 10_000, "step_s": 0.1}


def all_stored(runs: Path) -> list[StoredRun]:
    """The runs of the ledger, newest first."""
    store = Ledger(runs / "launcher.sqlite")
    found = store.list_newest()
    store.close()
    return found


def stored(runs: Path) -> StoredRun:
    return all_stored(runs)[0]


def running(runs: Path) -> bool:
    """Return whether the newest run is running; False before there is one."""
    begun = bool(list(runs.glob("fake-*/spec.json")))
    return begun and [each.run.state for each in all_stored(runs)] == [RunState.RUNNING]


async def output_of(process: asyncio.subprocess.Process) -> str:
    output, _ = await asyncio.wait_for(process.communicate(), LIMIT_S)
    return output.decode()


async def run_cli(*arguments: str) -> tuple[int | None, str]:
    process = await start_cli(*arguments, forged=True)
    output = await output_of(process)
    return process.returncode, output


async def seen(process: asyncio.subprocess.Process, sign: str) -> str:
    assert process.stdout is not None
    return await asyncio.wait_for(read_until(process.stdout, sign), LIMIT_S)


async def stopped(runs: Path) -> None:
    """Stop the newest run; its launcher goes."""
    code, output = await run_cli("stop", "newest", "--runs", str(runs))
    assert (code, "stopped" in output) == (0, True), output
    if address := launcher_address.read_address(runs):
        # It would stay for a while, for further commands.
        os.kill(address.pid, signal.SIGTERM)
    await nothing_left(runs)


async def test_a_detached_run_is_watched_left_and_watched_to_its_end(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    path = write_spec(tmp_path, learner=ENDLESS)
    code, output = await run_cli("train", str(path), "--runs", str(runs), "--detach")
    assert code == 0, output
    run_id = stored(runs).run.run_id
    assert f"Run {run_id} continues.\n  flotilla watch {run_id} --runs {runs}" in output
    watching = await start_cli("watch", "newest", "--runs", str(runs))
    assert run_id in await seen(watching, "step")
    watching.send_signal(signal.SIGINT)
    output = await output_of(watching)
    assert watching.returncode == 130
    assert f"Run {run_id} continues." in output
    assert f"flotilla stop {run_id} --runs {runs}   stops it" in output
    assert stored(runs).run.state is RunState.RUNNING
    again = await start_cli("watch", run_id, "--runs", str(runs), forged=True)
    await seen(again, "step")
    await stopped(runs)
    assert f"Run {run_id} was stopped." in await output_of(again)
    assert again.returncode == 1


@pytest.mark.slow
async def test_a_watch_to_the_completion_of_a_run_shows_its_files(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    path = write_spec(tmp_path, learner={"steps": 3, "step_s": 0.1})
    code, output = await run_cli("train", str(path), "--runs", str(runs), "--detach")
    assert code == 0, output
    for _ in range(2):
        code, output = await run_cli("watch", "--runs", str(runs))
        assert (code, "spec.json  the run spec" in output) == (0, True), output
    code, output = await run_cli("watch", "missing", "--runs", str(runs))
    assert (code, "there is no run 'missing'" in output) == (1, True), output


@pytest.mark.slow
async def test_a_watch_whose_launcher_is_killed_continues_with_another(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    path = write_spec(tmp_path, learner={"steps": 80, "step_s": 0.1})
    await run_cli("train", str(path), "--runs", str(runs), "--detach")
    watching = await start_cli("watch", "--runs", str(runs))
    await seen(watching, "step")
    address = launcher_address.read_address(runs)
    assert address is not None
    os.kill(address.pid, signal.SIGKILL)
    assert "another one takes over" in await output_of(watching)
    assert watching.returncode == 0
    assert stored(runs).run.state is RunState.COMPLETED


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
async def test_a_submit_that_is_left_leaves_the_run_and_shows_how_to_stop_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    runs = tmp_path / "runs"
    path = write_spec(tmp_path, learner=ENDLESS)
    command = ("submit", str(path), "--request-id", "mine", "--runs", str(runs))
    process = await start_cli(*command)
    await seen(process, "run running")
    process.send_signal(number)
    output = await output_of(process)
    run_id = stored(runs).run.run_id
    assert process.returncode == 130
    assert f"flotilla watch {run_id} --runs {runs}   follows it" in output
    assert f"flotilla cancel mine --runs {runs}   stops it" in output
    assert running(runs), "no stop was requested"
    code, output = await run_cli(*command, "--detach")
    assert (code, f"Run {run_id} continues." in output) == (0, True), output
    code, output = await run_cli("cancel", "mine", "--runs", str(runs))
    assert (code, f"run {run_id} stopped" in output) == (0, True), output
    # Repeated, a request names the same run; `newest` may be another one by then.
    again = ("submit", str(path), "--request-id", "again", "--resume", "newest", "--runs", runs)
    code, output = await run_cli(*map(str, again))
    assert (code, f"write --resume {run_id}" in output) == (2, True), output


def in_a_terminal(*command: str) -> tuple[subprocess.Popen[bytes], int]:
    """A process whose terminal is the pair of the returned descriptor."""
    ours, theirs = pty.openpty()
    # In its session, so that it gets the terminal's hangup; these tests may run under nohup.
    taking = (
        "import fcntl, os, signal, sys, termios\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"
        "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
        "os.execvp(sys.argv[1], sys.argv[1:])"
    )
    process = subprocess.Popen(
        (sys.executable, "-c", taking, *command),
        cwd=ROOT,
        env={**os.environ, **forged_fakes()},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    return process, ours


async def test_the_end_of_the_terminal_stops_a_run_in_good_order(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    path = write_spec(tmp_path, learner=ENDLESS)
    process, terminal = in_a_terminal(
        *(sys.executable, "-m", "flotilla_launcher.cli.app"),
        *("train", str(path), "--runs", str(runs)),
    )
    await until(lambda: running(runs), LIMIT_S)
    os.close(terminal)
    assert await asyncio.to_thread(process.wait, LIMIT_S) == 130
    assert stored(runs).run.state is RunState.STOPPED
    await nothing_left(runs)


@pytest.mark.slow
async def test_under_nohup_a_run_outlives_its_terminal(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    path = write_spec(tmp_path, learner={"steps": 60, "step_s": 0.1})
    output = tmp_path / "output"
    train = f"{sys.executable} -m flotilla_launcher.cli.app train {path} --runs {runs}"
    process, terminal = in_a_terminal("sh", "-c", f"nohup {train} > {output} 2>&1")
    await until(lambda: running(runs), LIMIT_S)
    os.close(terminal)
    # The shell may go with the terminal, the run does not.
    await asyncio.to_thread(process.wait, LIMIT_S)
    await until(lambda: stored(runs).run.state.has_ended, LIMIT_S)
    assert stored(runs).run.state is RunState.COMPLETED
    await until(lambda: "spec.json  the run spec" in output.read_text(), LIMIT_S)
    await nothing_left(runs)
