"""kill -9 of a learner whose groups are judged: each has one verdict, which is what it is trained
on, and nobody is asked about it again."""

import asyncio
import json
import signal
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from flotilla_common.rpc.free_ports import free_port
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, open_read_only
from flotilla_learner.groups.batcher import build_train_batch
from flotilla_learner.journal.audit import audit_journal
from flotilla_learner.journal.store import open_journal
from tests.faults.learner_process import learner_words
from tests.support.fake_ranks import FakeRanks
from tests.support.process_forge import ProcessForge
from tests.support.scripted_judge import (
    JudgedWorker,
    ScriptedJudge,
    attempts_of,
    judge_config,
    score_of,
    serving_judge,
)

STEPS, CONCURRENCY = 4, 2


async def check_trained(run_dir: Path, parameters: Path) -> None:
    """The ranks hold what the journaled plans make of the journaled scores."""
    journal = open_journal(run_dir)
    ranks = FakeRanks(run_dir / "again")
    for plan in await journal.plans_after(0):
        attempts = await journal.load_trajectories(plan.attempts)
        assert all(each.judged and each.is_graded for each in attempts)
        await ranks.train_step(build_train_batch(plan.step, attempts, plan.settings))
    await journal.close()
    assert (np.load(parameters) == ranks.parameters).all()


@pytest.mark.parametrize("moments", [("train", "publish"), ("trained", "train")])
async def test_a_killed_learner_asks_about_no_group_that_has_a_verdict(
    tmp_path: Path, rank_forge: ProcessForge, moments: tuple[str, ...]
) -> None:
    port, run_dir = free_port(), tmp_path / "run"
    exits: list[int] = []
    async with (
        serving_judge(ScriptedJudge()) as server,
        JudgedWorker(f"127.0.0.1:{port}").working(),
    ):
        judge = judge_config(server, concurrency=CONCURRENCY)
        journal = {"keep_payloads": True}
        changes = {"judge": judge, "steps": STEPS, "journal": journal}
        for moment in (*moments, "never"):
            words = learner_words(tmp_path, port, moment, 2, changes)
            process = await asyncio.create_subprocess_exec(*rank_forge.python_command(*words))
            exits.append(await asyncio.wait_for(process.wait(), 150))
    assert exits == [*(-signal.SIGKILL for _ in moments), 0]
    with closing(sqlite3.connect(run_dir / JOURNAL_FILE)) as db:
        rows = db.execute("SELECT group_id, scores FROM verdicts").fetchall()
    questions = Counter(body["messages"][1]["content"] for body in server.asked)
    # What a kill cut off between question and journal is asked about once more, and nothing else.
    assert sum(questions.values()) - len(rows) <= len(moments) * CONCURRENCY
    assert len(questions) >= len(rows)
    given = Counter(
        tuple(sorted(score_of(said[0]["content"]) for said in attempts_of(body).values()))
        for body in server.asked
    )
    for _, scores in rows:
        assert given[tuple(sorted(json.loads(scores).values()))]
    with open_read_only(run_dir / JOURNAL_FILE) as db:
        assert audit_journal(db).holds
    await check_trained(run_dir, tmp_path / "parameters.npy")
