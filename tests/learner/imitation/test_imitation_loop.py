"""Whole runs of a learner that imitates, with fake ranks: what it trains, logs, saves and
evaluates, and going on after a stop."""

import asyncio
import json
import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from flotilla_common.spec.config import parse_config
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.imitation.demonstration_set import make_batch
from flotilla_learner.imitation.step_schedule import StepSchedule
from tests.support.demonstrations import make_demonstrations, write_file
from tests.support.fake_ranks import FakeRanks
from tests.support.learner import FakeWorker, learner, write_tasks
from tests.support.repository import ROOT

COUNT, PER_STEP, STEPS = 20, 6, 7


class RankCrashError(Exception):
    """An error with which a test makes a rank fail."""


def config(tmp_path: Path, sft: dict[str, Any] | None = None, **changes: Any) -> LearnerConfig:
    path = tmp_path / "demonstrations.npz"
    if not path.exists():
        write_file(path, make_demonstrations(COUNT))
    values: dict[str, Any] = {
        "objective": "sft",
        "sft": {"data": str(path), "sequences_per_step": PER_STEP, **(sft or {})},
        "steps": STEPS,
        "checkpoint": {"every": 3},
        "attach_grace_s": 0.2,
        **changes,
    }
    return parse_config(LearnerConfig, values, where="test")


async def run_to_the_end(
    tmp_path: Path, given: LearnerConfig, ranks: FakeRanks | None = None
) -> FakeRanks:
    ranks = ranks or FakeRanks(tmp_path / "weights")
    async with learner(tmp_path, given, ranks) as running:
        await asyncio.wait_for(running.task, 60)
    return ranks


def points(tmp_path: Path, name: str) -> dict[int, float]:
    """The values of a metric by step, each of which may be logged only once."""
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = [(point["step"], point[name]) for line in lines if name in (point := json.loads(line))]
    assert len(dict(found)) == len(found), "a step was logged twice"
    return dict(found)


def query(tmp_path: Path, sql: str) -> list[Any]:
    with closing(sqlite3.connect(tmp_path / "run" / JOURNAL_FILE)) as db:
        return db.execute(sql).fetchall()


async def test_each_step_imitates_what_the_schedule_says_and_nothing_is_published(
    tmp_path: Path,
) -> None:
    calls: list[str] = []
    ranks = await run_to_the_end(
        tmp_path, config(tmp_path), FakeRanks(tmp_path / "weights", before=calls.append)
    )
    schedule, given = StepSchedule(COUNT, PER_STEP, 0), make_demonstrations(COUNT)
    assert [batch.step for batch in ranks.trained] == list(range(1, STEPS + 1))
    for batch in ranks.trained:
        assert batch.imitated
        wanted = make_batch(batch.step, [given[n] for n in schedule.places_of(batch.step)])
        for sequence, other in zip(batch.sequences, wanted.sequences, strict=True):
            np.testing.assert_array_equal(sequence.token_ids, other.token_ids)
            np.testing.assert_array_equal(sequence.policy_mask, other.policy_mask)
    assert "publish" not in calls
    assert query(tmp_path, "SELECT * FROM publications") == []
    assert [row[0] for row in query(tmp_path, "SELECT step FROM checkpoints ORDER BY step")] == [
        *(6, STEPS)
    ]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["eval"]) == (STEPS, {})


async def test_steps_and_held_out_losses_are_logged_once_each(tmp_path: Path) -> None:
    given = config(tmp_path, {"heldout": 0.2, "heldout_every": 3})
    ranks = await run_to_the_end(tmp_path, given)
    trained = COUNT - 4
    assert points(tmp_path, "sft/epoch") == {
        step: step * PER_STEP / trained for step in range(1, STEPS + 1)
    }
    tokens = points(tmp_path, "sft/tokens")
    assert tokens == {
        b.step: sum(int(s.policy_mask.sum()) for s in b.sequences) for b in ranks.trained
    }
    assert points(tmp_path, "sft/loss") == dict.fromkeys(range(1, STEPS + 1), 0.0)
    # Before the first step, every third, and after the last.
    assert list(points(tmp_path, "sft/heldout_loss")) == [0, 3, 6, STEPS]
    names = set(json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1]))
    page = (ROOT / "docs/metrics.md").read_text()
    of_this = {name for name in names if name.startswith("sft/")} | {"timing/score"}
    rows = [line for line in page.splitlines() if 'with `learner.objective = "sft"`' in line]
    documented = re.findall(r"`(\w+/\w+)`", "".join(row.split(" | ")[0] for row in rows))
    assert of_this == set(documented) and of_this <= names
    assert all(f"`{name}`" in page for name in names if "/" in name)
    assert not any(name.startswith(("mismatch/", "reward/", "async/")) for name in names)
    assert "policy/loss" not in names


@pytest.mark.parametrize(("moment", "count"), [("trained", 5), ("train", 5), ("saved", 1)])
async def test_a_run_that_goes_on_after_a_crash_ends_as_one_that_had_none(
    tmp_path: Path, moment: str, count: int
) -> None:
    sft = {"heldout": 0.2, "heldout_every": 2}
    whole = tmp_path / "whole"
    whole.mkdir()
    undisturbed = await run_to_the_end(whole, config(whole, sft))
    left = count

    def crash(name: str) -> None:
        nonlocal left
        left -= name == moment
        if name == moment and not left:
            raise RankCrashError

    cut = tmp_path / "cut"
    cut.mkdir()
    with pytest.raises(RankCrashError):
        await run_to_the_end(cut, config(cut, sft), FakeRanks(cut / "weights", before=crash))
    resumed = await run_to_the_end(cut, config(cut, sft))
    assert (resumed.parameters == undisturbed.parameters).all()
    for name in ("sft/tokens", "sft/heldout_loss", "sft/epoch"):
        assert points(cut, name) == points(whole, name)
    assert [row[0] for row in query(cut, "SELECT step FROM plans ORDER BY step")] == [
        *range(1, STEPS + 1)
    ]


async def test_a_drain_saves_and_the_next_start_goes_on(tmp_path: Path) -> None:
    trained = asyncio.Event()
    left = 3

    def count(name: str) -> None:
        nonlocal left
        left -= name == "train"
        if not left:
            trained.set()

    ranks = FakeRanks(tmp_path / "weights", train_s=0.05, before=count)
    async with learner(tmp_path, config(tmp_path), ranks) as running:
        await asyncio.wait_for(trained.wait(), 30)
        running.runtime.drain.set()
        await asyncio.wait_for(running.task, 30)
    assert len(ranks.trained) < STEPS
    saved = query(tmp_path, "SELECT max(step) FROM checkpoints")
    assert saved == [(len(ranks.trained),)]
    rest = await run_to_the_end(tmp_path, config(tmp_path))
    assert [batch.step for batch in rest.trained] == [*range(len(ranks.trained) + 1, STEPS + 1)]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sequences_per_step": 5}, r"learner\.sft\.sequences_per_step.* was 6"),
        ({"heldout": 0.3}, r"learner\.sft\.heldout"),
        ({"data": "other.npz"}, r"learner\.sft\.data.* not those that this run started"),
    ],
)
async def test_a_start_with_other_demonstrations_is_refused_by_the_name_of_the_key(
    tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    await run_to_the_end(tmp_path, config(tmp_path, steps=2))
    if "data" in change:
        given = make_demonstrations(COUNT)
        path = write_file(tmp_path / "other.npz", [*given[1:], replace(given[0], reward=0.9)])
        change = {"data": str(path)}
    with pytest.raises(ConfigError, match=named):
        await run_to_the_end(tmp_path, config(tmp_path, change))
    await run_to_the_end(tmp_path, config(tmp_path))


async def test_evaluations_publish_the_versions_that_they_need_and_only_those(
    tmp_path: Path,
) -> None:
    path = write_tasks(tmp_path / "heldout.json", 4, prefix="heldout")
    evals = {"sets": [{"name": "heldout", "tasks": str(path)}], "every": 4}
    async with (
        learner(tmp_path, config(tmp_path, eval=evals)) as running,
        FakeWorker(running.address).working(),
    ):
        await asyncio.wait_for(running.task, 90)
    assert query(tmp_path, "SELECT version FROM publications ORDER BY version") == [
        *((0,), (4,), (STEPS,))
    ]
    rows = query(tmp_path, "SELECT moment, version FROM evals ORDER BY version")
    assert rows == [("before", 0), ("during", 4), ("after", STEPS)]
    assert query(tmp_path, "SELECT * FROM groups WHERE purpose = 'train'") == []
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval"]["after"]["tasks"] == 4 and summary["eval"]["after"]["missing"] == 0


async def test_mode_eval_evaluates_a_finished_runs_newest_policy(tmp_path: Path) -> None:
    trained = await run_to_the_end(tmp_path, config(tmp_path))
    path = write_tasks(tmp_path / "heldout.json", 4, prefix="heldout")
    evals = {"sets": [{"name": "heldout", "tasks": str(path)}]}
    ranks = FakeRanks(tmp_path / "weights")
    async with (
        learner(tmp_path, config(tmp_path, eval=evals, mode="eval"), ranks) as running,
        FakeWorker(running.address).working(),
    ):
        await asyncio.wait_for(running.task, 60)
    assert (ranks.parameters == trained.parameters).all() and ranks.trained == []
    assert query(tmp_path, "SELECT moment, version FROM evals") == [("eval_only", STEPS)]
