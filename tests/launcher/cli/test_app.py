"""The `flotilla` command as a user runs it: real processes, fake services."""

import asyncio
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from flotilla_launcher.security import launcher_address
from flotilla_launcher.store.ledger import Ledger
from tests.support.launcher import left_running, spec, start_cli
from tests.support.repository import ROOT
from tests.support.waiting import until


def write_spec(folder: Path, **sections: Any) -> Path:
    path = folder / "spec.json"
    path.write_text(json.dumps(spec(**sections)))
    return path


async def run_cli(*arguments: str, forged: bool = True) -> tuple[int, str]:
    process = await start_cli(*arguments, forged=forged)
    output, _ = await asyncio.wait_for(process.communicate(), 60.0)
    assert process.returncode is not None
    return process.returncode, output.decode()


async def nothing_left(folder: Path, limit_s: float = 5.0) -> None:
    for _ in range(int(limit_s / 0.05)):
        if not left_running(folder):
            return
        await asyncio.sleep(0.05)
    raise AssertionError([process.cmdline() for process in left_running(folder)])


async def test_train_prints_a_line_per_step_and_the_files_and_leaves_nothing_running(
    tmp_path: Path,
) -> None:
    made = tmp_path / "made"
    prepare = [{"creates": str(made), "command": ["python", "-c", f"open({str(made)!r}, 'w')"]}]
    path = write_spec(tmp_path, prepare=prepare, learner={"steps": 4, "step_s": 0.3})
    runs = tmp_path / "runs"
    command = ("train", str(path), "--runs", str(runs), "--learner.steps=3")
    code, output = await run_cli(*command, forged=False)
    assert code == 0, output
    assert made.exists()
    assert f"Making {made}" in output
    assert "step 3/3" in output
    assert "pass@1 50.0%" in output
    assert "run completed" in output
    assert "spec.json" in output
    assert "\x1b" not in output, "no colours in a pipe"
    await nothing_left(runs)
    assert not (runs / "launcher.json").exists()
    code, output = await run_cli("status", "--runs", str(runs), forged=False)
    assert (code, "completed" in output) == (0, True)
    code, output = await run_cli("logs", "newest", "rollout", "--runs", str(runs), forged=False)
    assert (code, "hello from rollout-0" in output) == (0, True)


@pytest.mark.parametrize(
    "sign",
    [
        pytest.param("Making", marks=pytest.mark.slow),
        pytest.param("Run fake-", marks=pytest.mark.slow),
        pytest.param("rollout-0 running", marks=pytest.mark.slow),
        # Any: steps that end together are reported together.
        "step ",
    ],
)
async def test_ctrl_c_at_any_moment_leaves_no_process_and_a_resumable_run(
    tmp_path: Path, sign: str
) -> None:
    slow = ["python", "-c", "import time; time.sleep(1); open('made', 'w')"]
    prepare = [{"creates": str(tmp_path / "made"), "command": slow}] if sign == "Making" else []
    path = write_spec(tmp_path, prepare=prepare, learner={"steps": 10_000, "step_s": 0.1})
    runs = tmp_path / "runs"
    process = await start_cli("train", str(path), "--runs", str(runs), forged=True)
    assert process.stdout is not None
    seen = await asyncio.wait_for(read_until(process.stdout, sign), 30.0)
    process.send_signal(signal.SIGINT)
    rest, _ = await asyncio.wait_for(process.communicate(), 30.0)
    output = seen + rest.decode()
    assert process.returncode == 130, output
    await nothing_left(runs)
    if sign == "Making":
        assert "the same command starts over" in output
        return
    assert f"flotilla train {path} --resume --runs {runs}" in output
    if sign != "step ":
        return
    code, output = await run_cli(
        "train", str(path), "--resume", "--runs", str(runs), "--learner.steps=3"
    )
    assert code == 0, output


async def read_until(stream: asyncio.StreamReader, sign: str) -> str:
    seen = ""
    while sign not in seen:
        line = await stream.readline()
        assert line, f"{sign!r} never came:\n{seen}"
        seen += line.decode()
    return seen


async def test_a_second_ctrl_c_stops_at_once_what_does_not_drain(tmp_path: Path) -> None:
    wish = {"learner": {"steps": 10_000}, "rollout": {"deaf": True, "litter": True}}
    path = write_spec(tmp_path, launcher={"drain_s": 300.0}, **wish)
    runs = tmp_path / "runs"
    process = await start_cli("train", str(path), "--runs", str(runs), forged=True)
    assert process.stdout is not None
    await asyncio.wait_for(read_until(process.stdout, "run running"), 30.0)
    process.send_signal(signal.SIGINT)
    await asyncio.wait_for(read_until(process.stdout, "Stopping"), 10.0)
    await asyncio.sleep(0.5)
    process.send_signal(signal.SIGINT)
    await asyncio.wait_for(process.communicate(), 60.0)
    assert process.returncode == 130
    await nothing_left(runs)


async def test_a_failed_run_names_its_cause_and_the_fix(tmp_path: Path) -> None:
    path = write_spec(tmp_path, launcher={"max_restarts": 0}, rollout={"crash": "always"})
    runs = tmp_path / "runs"
    code, output = await run_cli("train", str(path), "--runs", str(runs), "--learner.steps=9999")
    assert code == 1, output
    assert "last words: out of luck" in output
    assert "--resume" in output


async def test_mistakes_are_named_before_anything_starts(tmp_path: Path) -> None:
    path = write_spec(tmp_path)
    runs = ("--runs", str(tmp_path / "runs"))
    for arguments, expected in (
        ((str(path), "--lerner.steps=3"), "did you mean 'learner'"),
        ((str(path), "--resume"), "there is no run of spec 'fake'"),
        ((str(path), "--learner.step=3"), "did you mean 'steps'"),
    ):
        code, output = await run_cli("train", *arguments, *runs)
        assert code == 2, output
        assert expected in output
    await nothing_left(tmp_path / "runs")


async def killed_with_its_launcher(process: asyncio.subprocess.Process, runs: Path) -> None:
    """Once the run is running, kill the command and its launcher; neither notices the other's
    end."""
    assert process.stdout is not None
    await asyncio.wait_for(read_until(process.stdout, "run running"), 30.0)
    address = launcher_address.read_address(runs)
    assert address is not None
    os.kill(address.pid, signal.SIGSTOP)
    process.kill()
    # Until a fork that it stands for has ended too.
    await asyncio.wait_for(process.communicate(), 40.0)
    os.kill(address.pid, signal.SIGKILL)


@pytest.mark.slow
async def test_services_drain_alone_when_no_launcher_comes(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    launcher = {"orphan_after_s": 1.0}
    path = write_spec(tmp_path, launcher=launcher, learner={"steps": 10_000, "step_s": 0.05})
    process = await start_cli("train", str(path), "--runs", str(runs), forged=True)
    await killed_with_its_launcher(process, runs)
    # A heartbeat waits up to 5 s for its answer before silence is noticed.
    await nothing_left(runs, limit_s=20.0)
    [run_dir] = [found.parent for found in runs.glob("fake-*/spec.json")]
    assert "launcher silent for" in (run_dir / "logs" / "learner-0.log").read_text()
    code, output = await run_cli("stop", "newest", "--runs", str(runs))
    assert (code, "stopped" in output) == (0, True)
    await nothing_left(runs)


async def test_a_command_whose_launcher_is_killed_continues_with_another(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    path = write_spec(tmp_path, learner={"steps": 60, "step_s": 0.1}, rollout={"litter": True})
    process = await start_cli("train", str(path), "--runs", str(runs), forged=True)
    assert process.stdout is not None
    await asyncio.wait_for(read_until(process.stdout, "run running"), 30.0)
    address = launcher_address.read_address(runs)
    assert address is not None
    os.kill(address.pid, signal.SIGKILL)
    rest, _ = await asyncio.wait_for(process.communicate(), 60.0)
    output = rest.decode()
    assert process.returncode == 0, output
    assert "another one takes over" in output
    assert "step 60/60" in output
    store = Ledger(runs / "launcher.sqlite")
    [stored] = store.list_newest()
    store.close()
    assert stored.run.state == "completed"
    assert [r.restarts for r in stored.run.replicas.values()] == [0, 0, 0], "nothing was restarted"
    await nothing_left(runs)


async def test_a_run_without_a_launcher_gets_one_from_the_next_command(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "runs"
    path = write_spec(tmp_path, learner={"steps": 10_000, "step_s": 0.05})
    process = await start_cli("train", str(path), "--runs", str(runs), forged=True)
    await killed_with_its_launcher(process, runs)
    # Services outlive their launcher; its other children may still be ending.
    await until(lambda: len(left_running(runs)) == 3)
    code, output = await run_cli("status", "newest", "--runs", str(runs))
    assert (code, "running" in output) == (0, True), output
    address = launcher_address.read_address(runs)
    assert address is not None
    again = await start_cli("train", str(path), "--resume", "--runs", str(runs), forged=True)
    assert again.stdout is not None
    await asyncio.wait_for(read_until(again.stdout, "step"), 30.0)
    again.send_signal(signal.SIGINT)
    await asyncio.wait_for(again.communicate(), 40.0)
    assert again.returncode == 130
    code, output = await run_cli("status", "newest", "--runs", str(runs))
    assert "outcome stopped, cleanup verified: no process" in output
    # It would stay for a while, for further commands.
    os.kill(address.pid, signal.SIGTERM)
    await nothing_left(runs)


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    probe = (
        "import sys, flotilla_launcher.cli.app; "
        "print([m for m in ('grpc', 'matplotlib', 'pydantic', 'numpy') if m in sys.modules])"
    )
    import subprocess

    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_every_command_has_a_help_text() -> None:
    from typer.testing import CliRunner

    from flotilla_launcher.cli.app import app

    for command in ("train", "eval", "status", "logs", "scale", "stop"):
        result = CliRunner().invoke(app, [command, "--help"])
        assert result.exit_code == 0
        assert re.search(r"Usage: \S+ " + command, result.output)
