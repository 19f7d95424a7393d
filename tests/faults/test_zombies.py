"""A learner that sleeps while another takes its run over finds itself fenced when it wakes."""

import asyncio
import signal
import sqlite3
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import closing
from pathlib import Path

import pytest_asyncio

from flotilla_common.rpc.free_ports import free_port
from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from flotilla_learner.journal.audit import audit_journal
from flotilla_learner.journal.store import open_journal
from tests.faults.learner_process import STEPS, learner_words
from tests.support.learner import FakeWorker
from tests.support.waiting import until

LIMIT_S = 60.0


Begin = Callable[[Path, int, Path], Awaitable[asyncio.subprocess.Process]]


@pytest_asyncio.fixture
async def begin() -> AsyncGenerator[Begin]:
    """Starts learners, and leaves none behind, asleep or not."""
    begun: list[asyncio.subprocess.Process] = []

    async def start(folder: Path, port: int, log: Path) -> asyncio.subprocess.Process:
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *learner_words(folder, port),
                stdout=file,
                stderr=file,
            )
        begun.append(process)
        return process

    yield start
    for process in begun:
        if process.returncode is None:
            process.kill()
            await process.wait()


def content(run_dir: Path) -> list[str]:
    with closing(sqlite3.connect(run_dir / JOURNAL_FILE)) as db:
        return list(db.iterdump())


def steps(run_dir: Path) -> int:
    with closing(sqlite3.connect(f"file:{run_dir / JOURNAL_FILE}?mode=ro", uri=True)) as db:
        return db.execute("SELECT count(*) FROM plans").fetchone()[0]


async def test_a_learner_that_slept_through_a_takeover_changes_nothing_any_more(
    begin: Begin, tmp_path: Path
) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "zombie.log"
    ports = free_port(), free_port()
    await open_journal(run_dir).close()
    zombie = await begin(tmp_path, ports[0], log)
    async with FakeWorker(f"127.0.0.1:{ports[0]}", "w0").working():
        await until(lambda: steps(run_dir) > 0)
    # It has no worker any more, so it is in no transaction.
    await asyncio.sleep(0.3)
    zombie.send_signal(signal.SIGSTOP)
    (run_dir / "journal.lock").unlink()
    successor = await begin(tmp_path, ports[1], tmp_path / "successor.log")
    async with FakeWorker(f"127.0.0.1:{ports[1]}", "w1").working():
        assert await asyncio.wait_for(successor.wait(), LIMIT_S) == 0
    before = content(run_dir), sorted((run_dir / "checkpoints").rglob("*"))
    zombie.send_signal(signal.SIGCONT)
    async with FakeWorker(f"127.0.0.1:{ports[0]}", "w2").working():
        assert await asyncio.wait_for(zombie.wait(), LIMIT_S) == 1
    assert "in epoch 2: this one, of epoch 1, ends" in log.read_text()
    assert (content(run_dir), sorted((run_dir / "checkpoints").rglob("*"))) == before
    with closing(sqlite3.connect(run_dir / JOURNAL_FILE)) as db:
        assert audit_journal(db).holds
    assert steps(run_dir) == STEPS
