"""kill -9 of a learner: the run resumes with the very tasks that it would have had."""

import asyncio
import random
import signal
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flotilla_common.rpc.free_ports import free_port
from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from tests.faults.learner_process import MOMENTS, learner_words
from tests.support.learner import FakeWorker
from tests.support.process_forge import ProcessForge

# Strictly on policy, and the worker's rewards are a function of the leases' seeds: then not only
# the order of tasks but all that is learned from them is the same.
CHANGES = {
    "max_staleness": 0,
    "steps": 6,
    "constant_groups": "replace",
    "max_refill": 2,
    "sampling": {
        "mixing": "proportional",
        "min_per_env": 1,
        "difficulty": {"enabled": True, "min_groups": 1, "decay": 1.0, "probe_share": 0.3},
    },
}


async def learn(forge: ProcessForge, folder: Path, port: int, kills: list[tuple[str, int]]) -> int:
    """Start learners that are killed, then one that is not; return how many died."""
    died, worker = 0, FakeWorker(f"127.0.0.1:{port}")
    async with worker.working():
        for moment, count in [*kills, ("never", 1)]:
            words = learner_words(folder, port, moment, count, CHANGES)
            process = await asyncio.create_subprocess_exec(*forge.python_command(*words))
            died += await asyncio.wait_for(process.wait(), 60) == -signal.SIGKILL
    return died


def journaled(folder: Path) -> dict[str, list[Any]]:
    """Draws, plans, filters and estimates of every task."""
    queries = {
        "drawn": "SELECT group_id, sequence_number, spec, state, step FROM groups ORDER BY 1",
        "plans": "SELECT step, attempts FROM plans ORDER BY 1",
        "changes": "SELECT number, step, cursors FROM curriculum ORDER BY id",
        "tasks": "SELECT * FROM curriculum_tasks ORDER BY 1",
        "events": "SELECT change, task, env, kind, reason FROM curriculum_events ORDER BY id",
    }
    with sqlite3.connect(folder / "run" / JOURNAL_FILE) as db:
        return {name: db.execute(sql).fetchall() for name, sql in queries.items()}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 10))]
)
async def test_a_killed_run_draws_learns_and_parks_as_if_it_had_never_been_killed(
    tmp_path: Path, rank_forge: ProcessForge, seed: int
) -> None:
    chooser = random.Random(seed)
    kills = [(chooser.choice(MOMENTS), chooser.randint(1, 3)) for _ in range(2)]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for folder, moments in ((whole, []), (cut, kills)):
        folder.mkdir()
        died = await learn(rank_forge, folder, free_port(), moments)
        assert bool(died) == bool(moments)
    expected, found = journaled(whole), journaled(cut)
    assert {"parked", "probed"} <= {kind for _, _, _, kind, _ in expected["events"]}
    assert {state for *_, state, _ in expected["drawn"]} == {"planned", "filtered"}
    for name, rows in expected.items():
        assert found[name] == rows, name
    parameters = [np.load(folder / "parameters.npy") for folder in (whole, cut)]
    assert (parameters[0] == parameters[1]).all()
