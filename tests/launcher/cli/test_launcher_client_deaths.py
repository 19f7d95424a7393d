"""A command whose launcher is killed while it starts, or in the middle of a call."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from flotilla_launcher.security import launcher_address
from flotilla_launcher.security.launcher_address import LauncherAddress
from flotilla_launcher.store.ledger import Ledger
from tests.launcher.cli.test_app import nothing_left, read_until, write_spec
from tests.support.launcher import start_cli
from tests.support.waiting import until

# On an idle machine half a second; before, it took the deadline of StartRun, three minutes.
NOTICED_S = 10.0
SLOW_CHECK = "tests.launcher.cli.slow_to_check"


async def launcher_of(runs: Path) -> LauncherAddress:
    await until(lambda: launcher_address.read_address(runs) is not None, 60.0)
    found = launcher_address.read_address(runs)
    assert found is not None
    return found


async def noticed(process: asyncio.subprocess.Process) -> None:
    """The command soon reports that its launcher is dead, and what becomes of the run."""
    assert process.stdout is not None
    await asyncio.wait_for(read_until(process.stdout, "another one takes over"), NOTICED_S)


async def completed(process: asyncio.subprocess.Process, runs: Path, idle_s: float = 5.0) -> str:
    """The run is completed, once, whichever launcher runs it; return the rest of the output."""
    rest, _ = await asyncio.wait_for(process.communicate(), 90.0)
    output = rest.decode()
    assert process.returncode == 0, output
    store = Ledger(runs / "launcher.sqlite")
    states = [stored.run.state for stored in store.list_newest()]
    store.close()
    assert states == ["completed"], "one request begins one run"
    await nothing_left(runs, idle_s)
    return output


async def train_and_kill(folder: Path, delay_s: float) -> float:
    """Kill the launcher this long after it serves; return the seconds until the command reported
    it, or 0 when it had no reason to."""
    runs = folder / "runs"
    # Longer than the longest delay, on whatever machine.
    path = write_spec(folder, learner={"steps": 6, "step_s": 0.5})
    process = await start_cli("train", str(path), "--runs", str(runs))
    address = await launcher_of(runs)
    await asyncio.sleep(delay_s)
    os.kill(address.pid, signal.SIGKILL)
    killed = time.monotonic()
    await noticed(process)
    took = time.monotonic() - killed
    await completed(process, runs)
    return took


@pytest.mark.parametrize(
    "delay_s",
    [pytest.param(n / 20, marks=pytest.mark.slow) for n in range(41)],
)
async def test_a_launcher_killed_just_after_it_serves_is_soon_missed_and_replaced(
    tmp_path: Path, delay_s: float
) -> None:
    print(f"noticed after {await train_and_kill(tmp_path, delay_s):.2f} s")


async def test_a_launcher_killed_in_mid_start_is_soon_missed_and_the_run_is_begun_once(
    tmp_path: Path,
) -> None:
    runs, hold = tmp_path / "runs", tmp_path / "hold"
    hold.touch()
    modules = {s: f"tests.support.fake_{s}" for s in ("rollout", "env_gateway")}
    path = write_spec(
        tmp_path,
        launcher={"modules": {**modules, "learner": SLOW_CHECK}},
        learner={"steps": 2, "message": str(hold)},
    )
    process = await start_cli("train", str(path), "--runs", str(runs), forged=True)
    address = await launcher_of(runs)
    # The learner receives its part of the spec, and checks it slowly.
    await until(lambda: hold.with_suffix(".checking").exists(), 60.0)
    os.kill(address.pid, signal.SIGKILL)
    await noticed(process)
    hold.unlink()
    await completed(process, runs)


@pytest.mark.slow
async def test_a_stop_whose_launcher_dies_reports_it_and_the_fix(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    path = write_spec(
        tmp_path,
        launcher={"orphan_after_s": 2.0},
        learner={"steps": 10_000},
        rollout={"deaf": True},
    )
    train = await start_cli("train", str(path), "--runs", str(runs))
    assert train.stdout is not None
    await asyncio.wait_for(read_until(train.stdout, "run running"), 60.0)
    train.kill()
    address = await launcher_of(runs)
    stop = await start_cli("stop", "newest", "--runs", str(runs), "--grace", "30")
    store = Ledger(runs / "launcher.sqlite")
    await until(lambda: store.list_newest()[0].run.state == "draining", 60.0)
    store.close()
    os.kill(address.pid, signal.SIGKILL)
    printed, _ = await asyncio.wait_for(stop.communicate(), NOTICED_S)
    assert stop.returncode == 1
    assert f"error: the launcher (process {address.pid}) has died" in printed.decode()
    assert "Repeat the command to start another launcher" in printed.decode()
    again = await start_cli("stop", "newest", "--runs", str(runs), "--grace", "0.1")
    printed, _ = await asyncio.wait_for(again.communicate(), 60.0)
    assert (again.returncode, "stopped" in printed.decode()) == (0, True), printed.decode()
    await nothing_left(runs)


@pytest.mark.slow
async def test_a_run_whose_launcher_died_with_its_command_continues_with_its_own_spec(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "runs"
    # Until it is looked at: the run continues under the launcher that takes over.
    hold = tmp_path / "hold"
    hold.touch()
    path = write_spec(tmp_path, learner={"steps": 2, "held_by": str(hold)})
    given = ("--seed=3", "--runs", str(runs))
    train = await start_cli("train", str(path), *given)
    assert train.stdout is not None
    await asyncio.wait_for(read_until(train.stdout, "run running"), 60.0)
    address = await launcher_of(runs)
    train.kill()
    os.kill(address.pid, signal.SIGKILL)
    await train.wait()
    # As when a batch system restarts a job: the same overrides are the run's own by now.
    [own] = runs.glob("*/spec.json")
    other = await start_cli("train", str(own), "--resume", "--seed=3", "--learner.steps=3", *given)
    printed, _ = await asyncio.wait_for(other.communicate(), 60.0)
    assert (other.returncode, "stop it first" in printed.decode()) == (1, True), printed.decode()
    again = await start_cli("train", str(own), "--resume", *given)
    hold.unlink()
    # The refused command has left its launcher to the run; it exits when it has idled.
    await completed(again, runs, 60.0)


@pytest.mark.slow
async def test_a_launcher_killed_before_it_serves_is_replaced(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    path = write_spec(tmp_path, learner={"steps": 1})
    process = await start_cli("train", str(path), "--runs", str(runs))
    lock = runs / "launcher.lock"
    await until(lock.exists, 60.0)
    (launcher,) = await asyncio.to_thread(children_of, process.pid)
    os.kill(launcher, signal.SIGKILL)
    await noticed(process)
    await completed(process, runs)


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(each) for each in path.read_text().split()]
