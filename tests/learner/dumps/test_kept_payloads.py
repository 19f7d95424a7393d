"""Checkpoints prune the journal, but nothing that a dump or a page still needs."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

from flotilla_common.run_folder.holds import Hold, write_hold
from tests.learner.dumps.dumped_run import dumped_run, setup_of

EVERY_STEP = {"every": 1, "keep": 1}


def kept_groups(tmp_path: Path) -> dict[int, int]:
    """Return how many groups of each step have all of their tokens."""
    sql = (
        "SELECT g.step, count(DISTINCT g.group_id) FROM groups g JOIN trajectories t"
        " USING (group_id) WHERE g.step IS NOT NULL AND t.payload IS NOT NULL GROUP BY g.step"
    )
    with closing(sqlite3.connect(tmp_path / "run/journal.sqlite")) as db:
        return dict(db.execute(sql).fetchall())


async def test_tokens_of_kept_steps_stay_and_older_ones_are_pruned(tmp_path: Path) -> None:
    setup = setup_of(tmp_path, keep=2)
    dumps, _ = await dumped_run(tmp_path, setup, in_step=True, steps=5, checkpoint=EVERY_STEP)
    assert dumps.lost == 0
    # Of each older step the first group stays for people.
    assert kept_groups(tmp_path) == {1: 1, 2: 1, 3: 1, 4: 3, 5: 3}


async def test_tokens_that_an_open_page_shows_stay(tmp_path: Path) -> None:
    write_hold(tmp_path / "run", "page", Hold(time.time() + 600, steps=(1, 1)))
    setup = setup_of(tmp_path, keep=1)
    dumps, _ = await dumped_run(tmp_path, setup, in_step=True, steps=4, checkpoint=EVERY_STEP)
    assert dumps.lost == 0
    assert kept_groups(tmp_path) == {1: 3, 2: 1, 3: 1, 4: 3}


async def test_a_slow_dump_finds_its_tokens(tmp_path: Path) -> None:
    """Steps here take milliseconds and their process of dumps seconds to start: all checkpoints are
    made before its first dump, and prune nothing of it."""
    dumps, _ = await dumped_run(tmp_path, setup_of(tmp_path, keep=1), checkpoint=EVERY_STEP)
    assert dumps.lost == 0
    assert len((tmp_path / "run/rollouts/step_3.jsonl").read_bytes()) > 0
    assert len(list((tmp_path / "run/evals/step_0").glob("env*.jsonl"))) == 3
