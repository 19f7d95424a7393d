"""`flotilla inspect` of a run whose files are not on this machine."""

import asyncio
import json
import os
import shutil
import signal
import sys
import time
import zipfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.request import HTTPCookieProcessor, OpenerDirector, build_opener

import psutil
import pytest

from flotilla_launcher.backends.sky import names
from flotilla_launcher.state import LEARNER, Outcome, Replica, ReplicaState, Run, RunState
from flotilla_launcher.store.ledger import Ledger
from flotilla_learner.checkpoints.adapters.fsspec_store import open_store
from tests.launcher.api.test_run_service_remote import address_of, launcher
from tests.launcher.cli.test_launcher_client import cli
from tests.reading.inspector.conftest import write_run
from tests.reading.inspector.made_runs import RUN, MadeRun, open_run
from tests.support.remote_checkpoints import RUN_ID, UploadingMachine
from tests.support.ssh_double import put_ssh_double, write_program
from tests.support.waiting import until

_SKY = """#!/bin/sh
echo "sky $@" >> {log}
"""
_MACHINE_PYTHON = """#!/bin/sh
exec {python} "$@"
"""


@dataclass(frozen=True, slots=True)
class RunThere:
    """A launcher's folder with one run, and the home of a user who has its launcher.json."""

    there: Path
    home: Path
    run: MadeRun
    secret: str
    ssh_log: Path

    @property
    def calls(self) -> list[str]:
        """What `ssh` and `sky` were called with."""
        return self.ssh_log.read_text().splitlines()


@pytest.fixture(autouse=True)
def ssh_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put programs in place of `ssh` and `sky`; return the file that has their arguments."""
    log = put_ssh_double(tmp_path / "bin", tmp_path / "machine")
    write_program(tmp_path / "bin/sky", _SKY.format(log=log))
    write_program(tmp_path / "bin/python", _MACHINE_PYTHON.format(python=sys.executable))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return log


def know_run(there: Path, run: Run, spec: str) -> None:
    """Write a run into the ledger, as a launcher that has ended leaves it."""
    ledger = Ledger(there / "launcher.sqlite")
    ledger.begin_run(run, spec, time.time(), {})
    ledger.save_run(run, run.replicas.values(), time.time())
    ledger.close()


@asynccontextmanager
async def elsewhere(tmp_path: Path) -> AsyncGenerator[RunThere]:
    """A run that the journal's own writer has made, and a launcher that knows it."""
    there = tmp_path / "there"
    run = open_run(there)
    await write_run(run)
    spec = (run.folder / "spec.json").read_text()
    ended = Run(RUN, "booking", {"learner": 1}, state=RunState.COMPLETED)
    know_run(there, replace(ended, outcome=Outcome.COMPLETED), spec)
    async with launcher(there) as served:
        await address_of(there, served)
        secret = (there / "launcher.json").read_text()
        yield RunThere(there, tmp_path / "home", run, secret, tmp_path / "bin/ssh.log")


@asynccontextmanager
async def inspecting(
    found: RunThere, *arguments: str
) -> AsyncGenerator[tuple[OpenerDirector, str]]:
    """Serve the pages; yield an opener for them, and the address of the run's page."""
    command = ("inspect", *arguments, "--runs", str(found.home / "runs"))
    async with cli(found.secret, *command) as process:
        assert process.stdout is not None
        lines: list[str] = []
        while not (line := (await process.stdout.readline()).decode()).startswith("Open "):
            assert line, lines
            lines.append(line)
        url = line.split()[1]
        opener = build_opener(HTTPCookieProcessor())
        await asyncio.to_thread(opener.open, url)
        children = psutil.Process(process.pid).children(recursive=True)
        yield opener, url.partition("?")[0]
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 30) == 0
        await until(lambda: not any(child.is_running() for child in children))


async def read(opener: OpenerDirector, url: str) -> str:
    def fetch() -> str:
        with opener.open(url) as page:
            return page.read().decode()

    return await asyncio.to_thread(fetch)


async def run_to_error(secret: str, *arguments: str) -> str:
    """Run `flotilla inspect`, which fails; return what it prints, in one line."""
    async with cli(secret, "inspect", *arguments) as process:
        output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1, output.decode()
    return " ".join(output.decode().split())


async def test_a_run_of_a_launcher_elsewhere_is_shown_down_to_its_tokens_and_leaves_nothing_here(
    tmp_path: Path,
) -> None:
    async with elsewhere(tmp_path) as found:
        async with inspecting(found, "newest") as (opener, page):
            assert "finished" in await read(opener, page)
            assert "g000011r0" in await read(opener, f"{page}/steps/3")
            text = await read(opener, f"{page}/attempts/g000011r0/1/0")
        assert "I look for hotels." in text and "no hotel is booked" in text
        [call] = found.calls
        port = page.partition("/runs/")[0].rpartition(":")[2]
        assert f"-L 127.0.0.1:{port}:127.0.0.1:{port} 127.0.0.1 cd " in call
        assert not (tmp_path / "home").exists()


async def test_two_commands_show_the_same_run(tmp_path: Path) -> None:
    async with elsewhere(tmp_path) as found, inspecting(found, RUN) as (first, page):
        async with inspecting(found, RUN) as (second, other):
            assert "finished" in await read(second, other)
        assert "finished" in await read(first, page)


async def test_a_bundle_is_made_of_a_run_elsewhere(tmp_path: Path) -> None:
    async with elsewhere(tmp_path) as found:
        out = tmp_path / "pages.zip"
        async with cli(found.secret, "inspect", RUN, "--bundle", str(out)) as process:
            output, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, output.decode()
        with zipfile.ZipFile(out) as file:
            pages = "".join(file.read(n).decode() for n in file.namelist() if n.endswith(".html"))
        assert "I look for hotels." in pages


async def test_a_run_on_rented_machines_is_shown_from_its_learners_machine(tmp_path: Path) -> None:
    async with elsewhere(tmp_path) as found:
        machine = tmp_path / "machine/sky_workdir"
        write_program(machine / ".venv/bin/python", _MACHINE_PYTHON.format(python=sys.executable))
        shutil.copytree(found.run.folder, machine / "runs" / "far-1")
        learner = Replica(LEARNER, 0, ReplicaState.RUNNING)
        far = Run("far-1", "far", {"learner": 1}, backend="sky", state=RunState.COMPLETED)
        know_run(found.there, replace(far, replicas={(LEARNER, 0): learner}), "{}")
        # A launcher's `sky` is next to its Python.
        secret = {**json.loads(found.secret), "python": str(tmp_path / "bin/python")}
        there = replace(found, secret=json.dumps(secret))
        async with inspecting(there, "far-1") as (opener, page):
            assert "I look for hotels." in await read(opener, f"{page}/attempts/g000011r0/1/0")
        cluster = names.member_name(names.owner_of(found.there), "far-1", (LEARNER, 0))
        through, status, at = found.calls
        assert " 127.0.0.1 cd " in through
        assert status == f"sky status {cluster}"
        assert f" {cluster} cd ~/sky_workdir " in at


async def test_a_run_whose_machines_are_gone_is_shown_from_its_store(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    machine = UploadingMachine(tmp_path / "old", open_store(f"file://{kept}/{RUN_ID}", {}))
    row = await machine.make(20)
    (machine.run_dir / "metrics.jsonl").write_text('{"step": 20, "reward/avg_raw_reward": 0.625}\n')
    machine.uploader.upload(machine.stage(row))
    shutil.rmtree(machine.run_dir)
    policy = {"model": "made/up", "max_model_len": 64}
    spec = {
        "name": "test",
        "policy": policy,
        "learner": {"checkpoint": {"remote": f"file://{kept}"}},
    }
    ended = Run(RUN_ID, "test", {"learner": 1}, backend="sky", state=RunState.COMPLETED)
    async with elsewhere(tmp_path) as found:
        know_run(found.there, replace(ended, outcome=Outcome.COMPLETED), json.dumps(spec))
        async with inspecting(found, RUN_ID) as (opener, page):
            assert "0.625" in await read(opener, page)
        assert found.calls == []


async def test_files_out_of_reach_are_named_with_what_can_be_done(tmp_path: Path) -> None:
    async with elsewhere(tmp_path) as found:
        for name, spec in (
            ("far-1", {"learner": {"checkpoint": {"remote": "file:///nothing/there"}}}),
            ("far-2", {}),
        ):
            run = Run(name, "far", {"learner": 1}, backend="sky", state=RunState.COMPLETED)
            text = json.dumps(
                {"name": "far", "policy": {"model": "made/up", "max_model_len": 64}, **spec}
            )
            know_run(found.there, replace(run, outcome=Outcome.COMPLETED), text)
        stored, nowhere, missing = [
            await run_to_error(found.secret, name) for name in ("far-1", "far-2", "missing")
        ]
        assert "file:///nothing/there/far-1: no run has a checkpoint there" in stored
        assert "learner.checkpoint.remote names no store" in nowhere
        assert "`flotilla logs far-2`" in nowhere
        assert "there is no run 'missing'" in missing


async def test_a_machine_that_ssh_does_not_reach_is_named_with_the_command_to_run_there(
    tmp_path: Path,
) -> None:
    async with elsewhere(tmp_path) as found:
        write_program(tmp_path / "bin/ssh", "#!/bin/sh\necho no route to host >&2\nexit 255\n")
        for arguments in ((RUN,), (RUN, "--bundle", str(tmp_path / "pages.zip"))):
            said = await run_to_error(found.secret, *arguments)
            assert "no route to host" in said
            assert f"run `flotilla inspect {RUN}` on 127.0.0.1 in {Path.cwd()}" in said
        address = json.loads(found.secret)
        earlier = json.dumps({key: address[key] for key in ("address", "token")})
        assert f"run `flotilla inspect {RUN}` on 127.0.0.1" in await run_to_error(earlier, RUN)
