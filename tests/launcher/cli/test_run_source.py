"""The commands on a machine that has only FLOTILLA_LAUNCHER, and no files of the runs."""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flotilla_common.rpc.free_ports import free_address
from flotilla_launcher.cli import (
    env_status,
    export,
    logs,
    run_source,
    scale,
    show,
    status,
    train_report,
)
from flotilla_launcher.cli.app import app
from flotilla_launcher.cli.terminal import Terminal
from tests.launcher.api.test_run_service_remote import launcher
from tests.launcher.cli.test_app import read_until, write_spec
from tests.launcher.cli.test_launcher_client import Hanging, cli, elsewhere
from tests.support.launcher import TOKEN, left_running
from tests.support.launcher_process import address_of
from tests.support.outsiders import beyond_loopback


@dataclass(frozen=True, slots=True)
class Laptop:
    """A folder without runs, and the copy of a launcher.json."""

    here: Path
    secret: str

    async def run(self, *words: str) -> tuple[int | None, str]:
        async with cli(self.secret, *words, "--runs", str(self.here)) as process:
            output, _ = await asyncio.wait_for(process.communicate(), 60)
        return process.returncode, output.decode()

    @asynccontextmanager
    async def submitted(self, spec: Path) -> AsyncGenerator[str]:
        """Submit a run for the length of the block; yield its id after its first step."""
        command = ("submit", str(spec), "--request-id", "mine")
        async with cli(self.secret, *command) as process:
            assert process.stdout is not None
            printed = await asyncio.wait_for(read_until(process.stdout, "training pass@1"), 60)
            yield printed.split()[1]
            await asyncio.wait_for(process.communicate(), 60)


async def test_status_logs_scale_and_stop_call_the_launcher_and_need_nothing_here(
    tmp_path: Path,
) -> None:
    there, host = tmp_path / "there", beyond_loopback()
    await asyncio.to_thread(there.mkdir)
    path = write_spec(tmp_path, learner={"steps": 10_000, "step_s": 0.1})
    async with launcher(there, "--listen", "0.0.0.0:0", "--advertise", host) as process:
        address = (await address_of(there, process)).address
        laptop = Laptop(tmp_path / "here", (there / "launcher.json").read_text())
        code, output = await laptop.run("stop", "newest")
        none = f"error: there are no runs at the launcher at {address}; `flotilla submit` starts"
        assert (code, none in output) == (1, True), output
        async with laptop.submitted(path) as run_id:
            code, output = await laptop.run("status")
            assert (code, "TRAINING PASS@1" in output) == (0, True), output
            assert f"{run_id}  running  train" in output
            code, output = await laptop.run("status", run_id)
            assert code == 0, output
            assert "backend local" in output
            assert "reward/avg_pass_at_1 = 0.5" in output
            assert f"files: {there / run_id} on {host}\n" in output
            columns = ("--columns", "learner.steps,reward/avg_pass_at_1")
            code, output = await laptop.run("runs", "--where", "learner.steps=10000", *columns)
            assert (code, output.split()[-2:]) == (0, ["10000", "0.5"]), output
            code, output = await laptop.run("logs", "newest", "rollout")
            assert (code, output.count("hello from rollout-0")) == (0, 1), output
            code, output = await laptop.run("scale", "newest", "rollout=2")
            assert (code, output) == (0, "rollout=2\n")
            code, output = await laptop.run("status", "missing")
            unknown = f"error: there is no run 'missing' at the launcher at {address}"
            assert (code, unknown in output) == (1, True), output
            code, output = await laptop.run("stop", "newest")
            assert (code, output) == (0, f"run {run_id} stopped\n")
        code, output = await laptop.run("status", run_id)
        assert "outcome stopped, cleanup verified: no process" in output
        assert "rollout-1" in output
        code, output = await laptop.run("logs", run_id, "nothing")
        assert (code, "no service 'nothing'" in output) == (1, True), output
    assert not laptop.here.exists()
    assert not left_running(laptop.here)


async def test_train_with_a_launcher_elsewhere_is_submit_and_finds_its_runs_there(
    tmp_path: Path,
) -> None:
    there = tmp_path / "there"
    await asyncio.to_thread(there.mkdir)
    path = write_spec(tmp_path, learner={"steps": 2})
    async with launcher(there) as process:
        await address_of(there, process)
        laptop = Laptop(tmp_path / "here", (there / "launcher.json").read_text())
        code, output = await laptop.run("train", str(path))
        assert (code, "Outcome: completed" in output) == (0, True), output
        run_id = output.split()[1]
        longer = write_spec(tmp_path, learner={"steps": 10_000, "step_s": 0.1})
        code, output = await laptop.run("train", str(longer), "--resume", run_id)
        assert code == 2 and "learner.steps: the run has 2, the file 10000" in output, output
        resume = ("train", str(longer), "--resume", "newest", "--update", "--detach")
        code, output = await laptop.run(*resume)
        assert (code, f"Run {run_id} continues." in output) == (0, True), output
        [request] = re.findall(r"flotilla cancel (\w+)", output)
        code, output = await laptop.run("stop", request, "--request")
        assert code == 0 and f"run {run_id} stopped" in output, output
        code, output = await laptop.run("train", str(longer), "--resume", "--accept-loss")
        assert code == 2 and "FLOTILLA_LAUNCHER names, in its folder" in " ".join(output.split())
        code, output = await laptop.run("eval", "newest")
        assert (code, f"Run: {run_id}" in output) == (0, True), output
    assert not laptop.here.exists()


async def test_logs_are_followed_over_a_restart_of_the_launcher_to_the_runs_end(
    tmp_path: Path,
) -> None:
    served = ("--listen", free_address())
    path = write_spec(tmp_path, learner={"steps": 10_000, "step_s": 0.1})
    # To follow a run, a launcher is required as long as the run takes.
    async with AsyncExitStack() as launchers:
        first = await launchers.enter_async_context(launcher(tmp_path, *served))
        address = await address_of(tmp_path, first)
        laptop = Laptop(tmp_path / "here", (tmp_path / "launcher.json").read_text())
        async with laptop.submitted(path), cli(laptop.secret, "logs", "newest", "-f") as following:
            assert following.stdout is not None
            seen = await asyncio.wait_for(read_until(following.stdout, "from rollout-0"), 60)
            os.kill(address.pid, signal.SIGKILL)
            await first.wait()
            second = await launchers.enter_async_context(launcher(tmp_path, *served))
            await address_of(tmp_path, second)
            await laptop.run("scale", "newest", "rollout=2")
            seen += await asyncio.wait_for(read_until(following.stdout, "from rollout-1"), 60)
            code, output = await laptop.run("stop", "newest")
            assert code == 0, output
            rest, _ = await asyncio.wait_for(following.communicate(), 60)
    assert following.returncode == 0
    printed = seen + rest.decode()
    for name in ("env_gateway-0", "learner-0", "rollout-0", "rollout-1"):
        assert printed.count(f"hello from {name}") == 1, printed


def test_commands_for_files_of_a_run_name_the_launchers_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLOTILLA_LAUNCHER", json.dumps({"address": "127.0.0.1:9", "token": TOKEN}))
    codes = (
        show.show_attempts("newest", tmp_path, show.AttemptFilter(), 3, None),
        show.show_tasks("far-1", tmp_path),
        export.export_model("far-1", None, tmp_path / "model", tmp_path, adapters=False),
        env_status.env_status("newest", tmp_path, None, as_json=False),
    )
    printed = capsys.readouterr().out
    assert codes == (1, 1, 1, 1)
    assert (
        printed.count(
            "This command reads a run's files: use it on the machine of the launcher that"
        )
        == 4
    )
    assert printed.count("FLOTILLA_LAUNCHER names, in its folder") == 4


def test_a_run_that_trained_elsewhere_ends_with_where_its_files_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_report.print_report(tmp_path / "far-1", Terminal())
    printed = capsys.readouterr().out
    assert printed == "The files of run far-1 are where its launcher runs, in runs/far-1\n"


async def test_an_old_copy_of_launcher_json_is_named_as_such(tmp_path: Path) -> None:
    async with elsewhere(Hanging()) as secret:
        old = json.dumps({**json.loads(secret), "token": TOKEN[::-1]})
        for words in (("status",), ("reap",)):
            code, output = await Laptop(tmp_path, old).run(*words)
            assert (code, "current launcher.json; copy it again" in output) == (1, True), output


def test_what_is_no_copy_of_launcher_json_is_refused_and_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FLOTILLA_LAUNCHER", '{"token": "a-secret"}')
    codes = (
        status.show_status("newest", tmp_path),
        logs.show_logs("newest", "", tmp_path, follow=True, lines=1, as_json=False),
        scale.scale_services("newest", ["rollout=2"], tmp_path),
    )
    printed = capsys.readouterr().out
    assert (codes, "a-secret" in printed) == ((1, 1, 1), False)
    assert printed.count("FLOTILLA_LAUNCHER is not the content of a launcher's") == 3


def test_an_error_about_a_silent_launcher_names_what_to_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_source, "_CALL_S", 0.5)
    gone = {"address": free_address(), "token": TOKEN}
    monkeypatch.setenv("FLOTILLA_LAUNCHER", json.dumps(gone))
    assert status.show_status("newest", tmp_path / "here") == 1
    printed = capsys.readouterr().out
    assert "the launcher that FLOTILLA_LAUNCHER names does not answer (DEADLINE_EXCEEDED" in printed
    assert "check that it runs, is reachable from here" in printed
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    "command",
    ["status", "logs", "scale", "stop", "submit", "cancel", "reap", "show", "export", "inspect"],
)
def test_help_names_the_called_launcher(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert "FLOTILLA_LAUNCHER" in result.output
