"""The choice of a checkpoint by a start, and the records that the journal keeps for it."""

import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from flotilla_learner.groups.batcher import build_train_batch
from flotilla_learner.journal.store import Journal, open_journal
from flotilla_learner.run.step_trainer import ReplayError
from tests.learner.run.test_train_loop import query, run_to_the_end, start
from tests.support.fake_ranks import FakeRanks

EVERY = {"every": 2, "keep": 2}


def damage(folder: Path, step: int) -> None:
    path = folder / "run" / "checkpoints" / f"step-{step:06d}" / "model.bin"
    path.write_bytes(b"x" * path.stat().st_size)


def kept_payloads(folder: Path) -> dict[int, int]:
    sql = (
        "SELECT step, count(t.payload) FROM groups g JOIN trajectories t USING (group_id)"
        " WHERE step NOT NULL GROUP BY step"
    )
    return dict(query(folder, sql))


def parameters(folder: Path, step: int) -> bytes:
    path = folder / "run" / "checkpoints" / f"step-{step:06d}" / "model.bin"
    return path.read_bytes()


async def replayed(journal: Journal, folder: Path) -> FakeRanks:
    ranks = FakeRanks(folder)
    for plan in await journal.plans_after(0):
        await ranks.train_step(
            build_train_batch(
                plan.step, await journal.load_trajectories(plan.attempts), plan.settings
            )
        )
    return ranks


async def test_a_damaged_newest_checkpoint_is_reported_and_replaced_by_a_replay(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await run_to_the_end(tmp_path, steps=6, checkpoint=EVERY)
    whole = parameters(tmp_path, 6)
    damage(tmp_path, 6)
    await start(tmp_path, steps=6, checkpoint=EVERY)
    assert parameters(tmp_path, 6) == whole
    out, err = capfd.readouterr()
    assert "a checkpoint is damaged, trying the previous one" in out + err
    assert [step for (step,) in query(tmp_path, "SELECT step FROM checkpoints")] == [4, 6]


async def test_a_damaged_checkpoint_does_not_push_out_one_that_is_whole(tmp_path: Path) -> None:
    await run_to_the_end(tmp_path, steps=4, checkpoint=EVERY)
    damage(tmp_path, 4)
    await run_to_the_end(tmp_path, steps=5, checkpoint={**EVERY, "every": 5})
    rows = query(tmp_path, "SELECT step FROM checkpoints ORDER BY step")
    assert [step for (step,) in rows] == [2, 5]


async def test_nothing_is_pruned_before_as_many_checkpoints_are_kept_as_should_be(
    tmp_path: Path,
) -> None:
    await run_to_the_end(tmp_path, steps=2, checkpoint=EVERY)
    assert kept_payloads(tmp_path) == {1: 6, 2: 6}
    damage(tmp_path, 2)
    await start(tmp_path, steps=2, checkpoint=EVERY)
    journal = open_journal(tmp_path / "run")
    try:
        ranks = await replayed(journal, tmp_path / "again")
    finally:
        await journal.close()
    saved = np.frombuffer(parameters(tmp_path, 2), np.uint64)
    assert saved.tolist() == [2, *ranks.parameters.tolist()]


async def test_payloads_stay_until_the_oldest_kept_checkpoint_contains_them(
    tmp_path: Path,
) -> None:
    await run_to_the_end(tmp_path, steps=6, checkpoint=EVERY)
    # Kept are 4 and 6. Of each pruned step the first group, two attempts, stays for people.
    assert kept_payloads(tmp_path) == {1: 2, 2: 2, 3: 2, 4: 2, 5: 6, 6: 6}


async def test_a_run_that_nothing_can_bring_back_fails(tmp_path: Path) -> None:
    await run_to_the_end(tmp_path, steps=4, checkpoint=EVERY)
    for step in (2, 4):
        damage(tmp_path, step)
    with pytest.raises(ReplayError, match="were pruned, and no checkpoint after it can be read"):
        await start(tmp_path, steps=4, checkpoint=EVERY)


async def test_a_run_whose_folder_was_moved_finds_its_checkpoints(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    await run_to_the_end(first, steps=4, checkpoint=EVERY)
    shutil.move(first, second)
    await start(second, steps=4, checkpoint=EVERY)
    lines: list[Any] = [
        json.loads(line) for line in (second / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [1, 2, 3, 4], "nothing was trained again"


async def test_what_came_late_is_accounted_for_as_dropped(tmp_path: Path) -> None:
    await run_to_the_end(tmp_path, steps=1)
    journal = open_journal(tmp_path / "run")
    try:
        (plan,) = await journal.plans_after(0)
        await journal.drop_try(plan.attempts[0], "late")
    finally:
        await journal.close()
    with sqlite3.connect(tmp_path / "run" / JOURNAL_FILE) as db:
        dropped = db.execute("SELECT count(*) FROM trajectories WHERE dropped = 'late'").fetchone()
    assert dropped == (1,)
