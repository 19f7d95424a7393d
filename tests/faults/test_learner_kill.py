"""kill -9 of a learner process: what it acknowledged is kept, and nothing is trained twice."""

import asyncio
import random
import signal
import sqlite3
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from flotilla_common.rpc.free_ports import free_port
from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from flotilla_learner.groups.batcher import build_train_batch
from flotilla_learner.journal.store import open_journal
from tests.faults.learner_process import MOMENTS, STEPS, learner_words
from tests.support.fake_ranks import FakeRanks
from tests.support.learner import FakeWorker
from tests.support.process_forge import ProcessForge


async def _replayed(run_dir: Path) -> NDArray[np.uint64]:
    """The parameters of a rank that runs all journaled plans, from the start, undisturbed."""
    journal = open_journal(run_dir)
    ranks = FakeRanks(run_dir / "again")
    try:
        for plan in await journal.plans_after(0):
            await ranks.train_step(
                build_train_batch(
                    plan.step, await journal.load_trajectories(plan.attempts), plan.settings
                )
            )
    finally:
        await journal.close()
    return ranks.parameters


def _keep_payloads(run_dir: Path) -> None:
    """Have the test's journal refuse to prune, so that all plans can be replayed from it."""
    with sqlite3.connect(run_dir / JOURNAL_FILE) as db:
        db.execute(
            "CREATE TRIGGER IF NOT EXISTS keep BEFORE UPDATE OF payload ON trajectories"
            " BEGIN SELECT RAISE(IGNORE); END"
        )


def _check_journal(run_dir: Path, receipts: dict[tuple[str, int, int], bytes]) -> None:
    with sqlite3.connect(run_dir / JOURNAL_FILE) as db:
        rows = db.execute("SELECT group_id, attempt_index, try, content_digest FROM trajectories")
        journaled = {(group, index, number): digest for group, index, number, digest in rows}
        planned = db.execute(
            "SELECT json_each.value FROM plans, json_each(plans.attempts)"
        ).fetchall()
        (steps,) = db.execute("SELECT count(*) FROM plans").fetchone()
    assert receipts.items() <= journaled.items(), "an acknowledged trajectory is lost"
    assert len(set(planned)) == len(planned), "an attempt was trained twice"
    assert steps == STEPS


@pytest.mark.parametrize(
    ("seed", "kills"), [(0, 2), *(pytest.param(n, 3, marks=pytest.mark.slow) for n in range(4))]
)
async def test_a_learner_killed_again_and_again_ends_as_if_it_had_never_been(
    tmp_path: Path, rank_forge: ProcessForge, seed: int, kills: int
) -> None:
    chooser = random.Random(seed)
    port = free_port()
    run_dir = tmp_path / "run"
    await open_journal(run_dir).close()
    _keep_payloads(run_dir)
    worker = FakeWorker(f"127.0.0.1:{port}")
    exits: list[int] = []
    async with worker.working():
        for _ in range(kills):
            moment = chooser.choice(MOMENTS)
            words = learner_words(tmp_path, port, moment, chooser.randint(1, 3))
            process = await asyncio.create_subprocess_exec(*rank_forge.python_command(*words))
            exits.append(await asyncio.wait_for(process.wait(), 30))
        words = learner_words(tmp_path, port)
        process = await asyncio.create_subprocess_exec(*rank_forge.python_command(*words))
        assert await asyncio.wait_for(process.wait(), 30) == 0
    assert exits[0] == -signal.SIGKILL
    _check_journal(run_dir, worker.receipts)
    final = np.load(tmp_path / "parameters.npy")
    assert (final == await _replayed(run_dir)).all()


async def test_a_learner_killed_while_a_submission_is_under_way_keeps_what_it_acknowledged(
    tmp_path: Path,
) -> None:
    port = free_port()
    worker = FakeWorker(f"127.0.0.1:{port}", delay_s=0.01)
    # A fork may outlive its stand-in, which is what is killed here, by a moment.
    real = (sys.executable, *learner_words(tmp_path, port))
    async with worker.working():
        for pause in (0.9, 1.3):
            process = await asyncio.create_subprocess_exec(*real)
            await asyncio.sleep(pause)
            if process.returncode is None:
                process.kill()
            await process.wait()
        process = await asyncio.create_subprocess_exec(*real)
        assert await asyncio.wait_for(process.wait(), 30) == 0
    _check_journal(tmp_path / "run", worker.receipts)
