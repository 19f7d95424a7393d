"""`flotilla inspect` on a machine that has only FLOTILLA_LAUNCHER, and no files of the runs."""

import asyncio
import json
import signal
import sqlite3
import time
import zipfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.request import HTTPCookieProcessor, OpenerDirector, build_opener

import pytest

from services.launcher.cli.interrupts import Interrupts
from services.launcher.cli.launcher_client import connect_to_launcher
from services.launcher.cli.run_mirror import FileCopy, mirrored_run
from services.launcher.state import Outcome, Run, RunState
from services.launcher.store import relayed_files
from services.launcher.store.ledger import Ledger
from services.learner.dumps.token_stats import stats_path
from services.learner.journal.store import open_journal
from tests.launcher.api.test_run_service_remote import address_of, launcher
from tests.launcher.cli.test_launcher_client import cli
from tests.learner.inspector.conftest import write_run
from tests.learner.inspector.made_runs import (
    RUN,
    MadeAttempt,
    MadeRun,
    conversation,
    open_run,
)


@dataclass(frozen=True, slots=True)
class RunThere:
    """A launcher's folder with one run, and the home of a user who has its launcher.json."""

    there: Path
    home: Path
    run: MadeRun
    secret: str

    @property
    def copy(self) -> Path:
        """The folder of the run in the cache of `home`."""
        [found] = self.home.glob(f"cache/flotilla/inspected/*/{RUN}")
        return found


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home/cache"))
    return tmp_path / "home"


def know_run(there: Path, run: Run, spec: str) -> None:
    """Write a run into the ledger, as a launcher that has ended leaves it."""
    ledger = Ledger(there / "launcher.sqlite")
    ledger.begin_run(run, spec, time.time(), {})
    ledger.save_run(run, (), time.time())
    ledger.close()


@asynccontextmanager
async def elsewhere(
    tmp_path: Path,
) -> AsyncGenerator[RunThere]:
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
        yield RunThere(there, tmp_path / "home", run, secret)


@asynccontextmanager
async def inspecting(
    found: RunThere, *arguments: str
) -> AsyncGenerator[tuple[OpenerDirector, str]]:
    """Serve the pages; yield an opener for them, and the address of the run's page."""
    command = ("inspect", *arguments, "--runs", str(found.home / "runs"))
    async with cli(found.secret, *command) as process:
        assert process.stdout is not None
        while not (line := (await process.stdout.readline()).decode()).startswith("Open "):
            assert line, "it has ended"
        url = line.split()[1]
        opener = build_opener(HTTPCookieProcessor())
        await asyncio.to_thread(opener.open, url)
        yield opener, url.partition("?")[0]
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 30) == 0


async def read(opener: OpenerDirector, url: str) -> str:
    def fetch() -> str:
        with opener.open(url) as page:
            return page.read().decode()

    return await asyncio.to_thread(fetch)


async def test_a_finished_run_of_a_launcher_elsewhere_is_shown_down_to_its_tokens(
    tmp_path: Path,
) -> None:
    async with elsewhere(tmp_path) as found:
        async with inspecting(found, "newest") as (opener, page):
            assert "finished" in await read(opener, page)
            assert "g000011r0" in await read(opener, f"{page}/steps/3")
            text = await read(opener, f"{page}/attempts/g000011r0/1/0")
        stats = stats_path(found.copy, 3).read_bytes()
        assert stats == stats_path(found.run.folder, 3).read_bytes()
        there, here = (
            (folder / "metrics.jsonl").read_text() for folder in (found.run.folder, found.copy)
        )
        assert there == here
        # Its policy is in a folder of this machine: there are texts.
        assert "I look for hotels." in text and "no hotel is booked" in text
        with closing(sqlite3.connect(found.copy / "journal.sqlite")) as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert not (tmp_path / "home/runs").exists()


async def test_nothing_but_the_files_of_pages_comes_and_no_link_is_followed(
    tmp_path: Path,
) -> None:
    async with elsewhere(tmp_path) as found:
        secret = tmp_path / "secret.jsonl"
        secret.write_text("FLEET_API_KEY=1")
        (found.run.folder / "alarms.jsonl").symlink_to(secret)
        (found.run.folder / ".env").write_text("FLEET_API_KEY=2")
        (found.run.folder / "logs").mkdir()
        (found.run.folder / "logs/learner-0.log").write_text("FLEET_API_KEY=3")
        stats = found.run.folder / "token_stats"
        (stats / "step_000009.npz").symlink_to(secret)
        (stats / "other.npz").write_text("FLEET_API_KEY=4")
        async with inspecting(found, RUN):
            pass
        names = {str(p.relative_to(found.copy)) for p in found.copy.rglob("*") if p.is_file()}
        assert names == {
            *("journal.sqlite", "metrics.jsonl", "spec.json", "summary.json"),
            *(f"token_stats/step_00000{step}.npz" for step in (1, 2, 3)),
            *("mirror.json", "mirror.lock", "versions.json"),
        }
        for path in found.home.rglob("*"):
            if path.is_file():
                assert b"FLEET_API_KEY" not in path.read_bytes(), path
                assert found.secret[-20:].encode() not in path.read_bytes(), path
        left = [path.name for path in found.run.folder.glob(".relayed-*")]
        assert left == []


async def test_a_bundle_is_made_of_a_run_elsewhere_with_a_tokenizer_from_here(
    tmp_path: Path,
) -> None:
    async with elsewhere(tmp_path) as found:
        (tmp_path / "model").rename(tmp_path / "kept")
        (tmp_path / "there" / "model").mkdir()
        out = tmp_path / "pages.zip"
        arguments = ("inspect", RUN, "--bundle", str(out), "--policy", str(tmp_path / "kept"))
        async with cli(found.secret, *arguments) as process:
            output, _ = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, output.decode()
        with zipfile.ZipFile(out) as file:
            pages = "".join(file.read(n).decode() for n in file.namelist() if n.endswith(".html"))
        assert "I look for hotels." in pages


async def test_a_refresh_brings_what_is_new_and_only_the_blocks_that_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with elsewhere(tmp_path) as found:
        run = open_again(found.run)
        big = "find hotels in Rome " * 40_000
        await run.add_group([MadeAttempt(conversation(2, answer=big), 1.0)] * 6, version=2)
        async with connect_to_launcher(found.there, Interrupts(), start=False) as connection:
            with mirrored_run(connection, RUN) as mirror:
                assert await mirror.refresh() is False
                sent = count_blocks(monkeypatch)
                run.log(4, reward__avg_raw_reward=0.9)
                (run.folder / "token_stats/step_000001.npz").unlink()
                await run.add_group([MadeAttempt(conversation(2), 0.0)], version=2)
                await mirror.refresh()
                whole = blocks_of(mirror.folder / "journal.sqlite")
                assert 0 < len(sent) < whole // 2, whole
                here = (mirror.folder / "metrics.jsonl").read_text()
                assert here == (run.folder / "metrics.jsonl").read_text()
                assert not (mirror.folder / "token_stats/step_000001.npz").exists()
                assert count_tries(mirror.folder) == count_tries(run.folder)
                sent.clear()
                await mirror.refresh()
                assert sent == []
        await run.journal.close()


async def test_a_fetch_that_was_cut_resumes_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with elsewhere(tmp_path) as found:
        run = open_again(found.run)
        answers = ["find hotels in Rome " * 40_000, "search flights to Rome " * 40_000]
        for answer in answers:
            await run.add_group([MadeAttempt(conversation(2, answer=answer), 1.0)], version=2)
        async with connect_to_launcher(found.there, Interrupts(), start=False) as connection:
            with mirrored_run(connection, RUN) as mirror:
                with monkeypatch.context() as cutting, pytest.raises(ConnectionError):
                    count_blocks(cutting, cut_at=8)
                    await mirror.refresh()
                assert not (mirror.folder / "journal.sqlite").exists()
            with mirrored_run(connection, RUN) as mirror:
                sent = count_blocks(monkeypatch)
                await mirror.refresh()
                assert min(sent) == 8 * relayed_files.BLOCK_BYTES
                assert count_tries(mirror.folder) == count_tries(run.folder)
        await run.journal.close()


async def test_two_commands_show_the_same_run(tmp_path: Path) -> None:
    async with elsewhere(tmp_path) as found, inspecting(found, RUN) as (first, page):
        async with inspecting(found, RUN) as (second, other):
            assert "finished" in await read(second, other)
        assert "finished" in await read(first, page)


async def test_a_run_on_rented_machines_is_found_by_its_store(tmp_path: Path) -> None:
    there, home = tmp_path / "there", tmp_path / "home"
    spec = {"learner": {"checkpoint": {"remote": "s3://bucket/kept"}}}
    for name, text in (("far-1", json.dumps(spec)), ("far-2", "{}")):
        (there / name).mkdir(parents=True)
        run = Run(name, "far", {"learner": 1}, backend="sky")
        know_run(there, replace(run, state=RunState.COMPLETED, outcome=Outcome.COMPLETED), text)
    async with launcher(there) as served:
        await address_of(there, served)
        secret = (there / "launcher.json").read_text()
        printed: list[str] = []
        for name in ("far-1", "far-2", "missing"):
            async with cli(secret, "inspect", name, "--runs", str(home)) as process:
                output, _ = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == 1
            printed.append(" ".join(output.decode().split()))
    assert "restore_command s3://bucket/kept/far-1 --config SPEC --runs kept" in printed[0]
    assert "dumps are in s3://bucket/kept/far-1/dumps" in printed[0]
    assert "flotilla export-trajectories far-1" in printed[0]
    assert "learner.checkpoint.remote is not set" in printed[1]
    assert "flotilla inspect far-2 --bundle OUT.zip" in printed[1]
    assert "there is no run 'missing'" in printed[2]


def open_again(run: MadeRun) -> MadeRun:
    """Open the journal of a made run as a resuming learner does."""
    return replace(run, journal=open_journal(run.folder))


def count_blocks(monkeypatch: pytest.MonkeyPatch, cut_at: int = 1 << 30) -> list[int]:
    """Return the offsets of the journal's blocks that come from now on; the connection is lost
    after some."""
    sent: list[int] = []
    write = FileCopy.write

    def count(copy: FileCopy, offset: int, data: bytes) -> None:
        if copy.path.name == "journal.sqlite":
            sent.append(offset)
        if len(sent) > cut_at:
            raise ConnectionError("cut")
        write(copy, offset, data)

    monkeypatch.setattr(FileCopy, "write", count)
    return sent


def blocks_of(path: Path) -> int:
    return -(-path.stat().st_size // relayed_files.BLOCK_BYTES)


def count_tries(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "journal.sqlite")) as db:
        return int(db.execute("SELECT count(*) FROM trajectories").fetchone()[0])
