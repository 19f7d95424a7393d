"""`flotilla train` on a machine whose only GPU is taken: refused at once, or in the queue."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_launcher.security.launcher_address import read_address
from tests.launcher.backends.local.queueing import Machine, gpu_name, machine, wish
from tests.launcher.cli.test_app import nothing_left, read_until
from tests.support.launcher import start_cli


def write_wish(folder: Path) -> str:
    path = folder / "spec.json"
    path.write_text(json.dumps(wish()))
    return str(path)


async def finish(process: asyncio.subprocess.Process) -> str:
    printed, _ = await asyncio.wait_for(process.communicate(), 60.0)
    return printed.decode()


def runs_of(here: Machine) -> list[str]:
    return sorted(path.name for path in here.runs.glob("fake-*"))


async def test_ctrl_c_in_the_queue_leaves_nothing_and_status_shows_the_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = gpu_name()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu)
    async with machine(tmp_path / "runs", gpu) as here:
        first = await here.start()
        await here.running(first)
        words = ("train", write_wish(tmp_path), "--runs", str(here.runs))
        process = await start_cli(*words, "--wait", "--priority=3", forged=True)
        assert process.stdout is not None
        sign = f"place 1 in the queue: needs 1 GPU, 0 of 1 are free: run {first} holds GPU {gpu}"
        await asyncio.wait_for(read_until(process.stdout, sign), 60.0)
        [waiting] = here.known_runs() - {first}
        shown = await finish(await start_cli("status", "--runs", str(here.runs), forged=True))
        assert f"{waiting}  queued (1)" in shown
        shown = await finish(
            await start_cli("status", waiting, "--runs", str(here.runs), forged=True)
        )
        assert sign in shown
        process.send_signal(signal.SIGINT)
        printed = await finish(process)
        assert process.returncode == 130, printed
        assert "Interrupted before the run began; the same command starts over." in printed
        assert here.known_runs() == {first}
        assert runs_of(here) == [first]
        await here.running(first)


async def test_a_refused_train_ends_no_run_that_its_launcher_has_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = gpu_name()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu)
    async with machine(tmp_path / "runs", gpu) as here:
        first = await here.start()
        await here.running(first)
        await here.kill_launcher()
        words = ("train", write_wish(tmp_path), "--runs", str(here.runs))
        process = await start_cli(*words, forged=True)
        printed = await finish(process)
        assert process.returncode == 1, printed
        [line] = [line for line in printed.splitlines() if line.startswith("error: ")]
        assert f"run {first} holds GPU {gpu}" in line and "--wait" in line
        assert (here.known_runs(), runs_of(here)) == ({first}, [first])
        # The launcher of that command stays, because it has this run to run.
        address = read_address(here.runs)
        assert address is not None
        here.process = process
        assert (await here.running(first)).state == pb.RUN_STATE_RUNNING
        await here.stop(first)
        os.kill(address.pid, signal.SIGTERM)


async def test_ctrl_c_in_the_queue_ends_the_commands_own_launcher_with_nothing_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, other = gpu_name(), tmp_path / "other"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu)
    async with machine(tmp_path / "runs", gpu) as here:
        first = await here.start()
        await here.running(first)
        words = ("train", write_wish(tmp_path), "--runs", str(other), "--wait")
        process = await start_cli(*words, forged=True)
        assert process.stdout is not None
        sign = f"run {first} in {here.runs} holds GPU {gpu}"
        await asyncio.wait_for(read_until(process.stdout, sign), 60.0)
        process.send_signal(signal.SIGINT)
        printed = await finish(process)
        assert process.returncode == 130, printed
        await nothing_left(other)
        assert Machine(other, gpu).known_runs() == set()
        assert list(other.glob("fake-*")) == []
