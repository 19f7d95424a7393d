"""Whole runs of a learner with a warm start, with fake ranks: what it trains, publishes, logs and
evaluates, and going on after a stop at any place."""

import asyncio
import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from flotilla_learner.config.learner import LearnerConfig
from tests.support.demonstrations import make_demonstrations, write_file
from tests.support.fake_ranks import FakeRanks
from tests.support.learner import FakeWorker, learner, make_config, write_tasks

COUNT, PER_STEP, WARM, STEPS = 20, 6, 4, 3


class LostRankError(Exception):
    """An error with which a test makes a rank fail."""


def config(tmp_path: Path, warm: dict[str, Any] | None = None, **changes: Any) -> LearnerConfig:
    path = tmp_path / "demonstrations.npz"
    if not path.exists():
        write_file(path, make_demonstrations(COUNT))
    table = {"data": str(path), "sequences_per_step": PER_STEP, "steps": WARM, **(warm or {})}
    # Strictly on policy, so that what is sampled follows from the seed.
    values: dict[str, Any] = {"steps": STEPS, "max_staleness": 0, "checkpoint": {"every": 3}}
    return make_config(tmp_path, warm_start=table, **values | changes)


def evals(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    path = write_tasks(tmp_path / "heldout.json", 4, prefix="heldout")
    return {"sets": [{"name": "heldout", "tasks": str(path)}], **changes}


async def run_to_the_end(
    tmp_path: Path, given: LearnerConfig, ranks: FakeRanks | None = None
) -> FakeRanks:
    ranks = ranks or FakeRanks(tmp_path / "weights")
    async with (
        learner(tmp_path, given, ranks) as running,
        FakeWorker(running.address).working(),
    ):
        await asyncio.wait_for(running.task, 90)
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


async def test_the_first_steps_imitate_and_those_after_train_on_attempts(tmp_path: Path) -> None:
    ranks = await run_to_the_end(tmp_path, config(tmp_path, {"heldout": 0.2, "heldout_every": 3}))
    assert [(b.step, b.imitated) for b in ranks.trained] == [
        (step, step <= WARM) for step in range(1, WARM + STEPS + 1)
    ]
    versions = query(tmp_path, "SELECT version FROM publications ORDER BY version")
    assert versions == [(version,) for version in range(WARM, WARM + STEPS + 1)]
    attempts = query(tmp_path, "SELECT step, json_array_length(attempts) FROM plans ORDER BY step")
    assert attempts == [(step, 0 if step <= WARM else 6) for step in range(1, WARM + STEPS + 1)]
    # No more groups than the steps after the warm start need, each of which knows its step.
    groups = query(tmp_path, "SELECT step, count(*) FROM groups GROUP BY step")
    assert groups == [(step, 3) for step in range(WARM + 1, WARM + STEPS + 1)]
    assert list(points(tmp_path, "sft/loss")) == [1, 2, 3, 4]
    assert list(points(tmp_path, "sft/heldout_loss")) == [0, 3, 4]
    assert list(points(tmp_path, "reward/avg_raw_reward")) == [5, 6, 7]
    assert set(points(tmp_path, "async/staleness_max").values()) == {0.0}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["steps"], summary["trajectories"]["trained"]) == (WARM + STEPS, STEPS * 6)


async def test_base_and_imitator_are_evaluated_and_every_counts_from_the_switch(
    tmp_path: Path,
) -> None:
    given = config(tmp_path, eval=evals(tmp_path, every=2), steps=5)
    await run_to_the_end(tmp_path, given)
    assert query(tmp_path, "SELECT moment, version FROM evals ORDER BY version") == [
        *(("before", 0), ("during", WARM), ("during", WARM + 2), ("during", WARM + 4)),
        ("after", WARM + 5),
    ]
    versions = query(tmp_path, "SELECT version FROM publications ORDER BY version")
    assert versions == [(0,), *((version,) for version in range(WARM, WARM + 6))]
    plan = query(tmp_path, "SELECT min(step), max(step) FROM groups WHERE purpose = 'train'")
    assert plan == [(WARM + 1, WARM + 5)]


async def test_the_imitator_is_evaluated_even_if_no_later_step_is(tmp_path: Path) -> None:
    sets = evals(tmp_path)["sets"]
    only = {"sets": [{**sets[0], "when": ["during"]}]}
    await run_to_the_end(tmp_path, config(tmp_path, eval=only))
    assert query(tmp_path, "SELECT moment, version FROM evals") == [("during", WARM)]


async def test_nothing_is_leased_for_training_before_the_switch(tmp_path: Path) -> None:
    given = config(tmp_path, eval=evals(tmp_path))
    ranks = FakeRanks(tmp_path / "weights", train_s=0.2)
    async with learner(tmp_path, given, ranks) as running:
        worker = FakeWorker(running.address)
        attached = asyncio.create_task(worker.attach())
        await asyncio.wait_for(worker.updated.wait(), 10)
        seen: list[tuple[int, int]] = []
        while len([purpose for purpose, _ in seen if purpose == pb.PURPOSE_TRAIN]) < 3:
            if lease := await worker.poll():
                seen.append((lease.purpose, worker.policy.version))
                await worker.play(lease)
        attached.cancel()
        await asyncio.gather(attached, return_exceptions=True)
        await worker.channel.close()
    assert all(version >= WARM for purpose, version in seen if purpose == pb.PURPOSE_TRAIN)
    assert (pb.PURPOSE_EVAL, 0) in seen


async def test_the_status_names_the_phase_and_counts_all_steps(tmp_path: Path) -> None:
    ranks = FakeRanks(tmp_path / "weights", train_s=0.3)
    async with learner(tmp_path, config(tmp_path), ranks) as running:
        worker = FakeWorker(running.address)
        phases: list[str] = []
        steps, metrics, losses = 0, dict[str, float](), list[float]()
        while "sampling" not in phases:
            status = await worker.groups.GetStatus(pb.GetStatusRequest(), wait_for_ready=True)
            phases += [status.phase] if status.phase not in phases else []
            steps, metrics = status.step, dict(status.metrics)
            losses += [metrics["sft/loss"]] if "sft/loss" in metrics else []
            await asyncio.sleep(0.02)
        await worker.channel.close()
    assert [each for each in phases if each in ("imitating", "sampling")] == [
        *("imitating", "sampling")
    ]
    assert "training" not in phases
    # What imitation measured is told while it lasts.
    assert losses and not any(name.startswith("sft/") for name in metrics)
    assert (steps, running.runtime.config.total_steps) == (WARM, WARM + STEPS)


MOMENTS = [
    *(("train", 2), ("trained", WARM), ("publish", 1), ("train", WARM + 1)),
    *(("trained", WARM + 1), ("train", WARM + 3), ("saved", 1), ("saved", 2)),
]


@pytest.mark.parametrize(("moment", "count"), MOMENTS)
async def test_a_run_that_goes_on_after_a_crash_ends_as_one_that_had_none(
    tmp_path: Path, moment: str, count: int
) -> None:
    warm = {"heldout": 0.2, "heldout_every": 2}
    whole = tmp_path / "whole"
    whole.mkdir()
    undisturbed = await run_to_the_end(whole, config(whole, warm))
    left = count

    def crash(name: str) -> None:
        nonlocal left
        left -= name == moment
        if name == moment and not left:
            raise LostRankError

    cut = tmp_path / "cut"
    cut.mkdir()
    with pytest.raises(LostRankError):
        await run_to_the_end(cut, config(cut, warm), FakeRanks(cut / "weights", before=crash))
    resumed = await run_to_the_end(cut, config(cut, warm))
    assert (resumed.parameters == undisturbed.parameters).all()
    for name in ("sft/tokens", "sft/heldout_loss", "sft/epoch"):
        assert points(cut, name) == points(whole, name)
    for sql in (
        "SELECT step, attempts FROM plans ORDER BY step",
        "SELECT DISTINCT version, fingerprint FROM publications ORDER BY version",
        "SELECT group_id, state, step FROM groups ORDER BY group_id",
    ):
        assert query(cut, sql) == query(whole, sql)


async def test_the_evaluation_of_the_imitator_that_a_crash_cut_off_is_done_before_the_replay(
    tmp_path: Path,
) -> None:
    held = evals(tmp_path)["sets"][0]
    given = config(tmp_path, eval={"sets": [{**held, "when": ["during"]}]})
    async with learner(tmp_path, given) as running:
        worker = FakeWorker(running.address)
        attached = asyncio.create_task(worker.attach())
        await asyncio.wait_for(worker.updated.wait(), 10)
        played = 0
        while played < 3:
            if (lease := await worker.poll()) and lease.purpose == pb.PURPOSE_TRAIN:
                await worker.play(lease)
                played += 1
        for _ in range(1000):
            if query(tmp_path, f"SELECT * FROM plans WHERE step = {WARM + 1}"):
                break
            await asyncio.sleep(0.01)
        attached.cancel()
        await asyncio.gather(attached, return_exceptions=True)
        await worker.channel.close()
    assert query(tmp_path, "SELECT * FROM evals") == []
    await run_to_the_end(tmp_path, given)
    assert query(tmp_path, "SELECT moment, version FROM evals") == [("during", WARM)]
    ((text,),) = query(tmp_path, "SELECT results FROM evals")
    assert json.loads(text)["heldout"]["missing"] == 0


async def test_a_drain_while_it_imitates_saves_and_the_next_start_goes_on(tmp_path: Path) -> None:
    trained = asyncio.Event()
    ranks = FakeRanks(
        tmp_path / "weights",
        train_s=0.05,
        before=lambda name: trained.set() if name == "trained" else None,
    )
    async with learner(tmp_path, config(tmp_path), ranks) as running:
        await asyncio.wait_for(trained.wait(), 30)
        running.runtime.drain.set()
        await asyncio.wait_for(running.task, 30)
    assert 0 < len(ranks.trained) < WARM
    assert query(tmp_path, "SELECT * FROM publications") == []
    rest = await run_to_the_end(tmp_path, config(tmp_path))
    steps = [batch.step for batch in rest.trained]
    assert steps == [*range(len(ranks.trained) + 1, WARM + STEPS + 1)]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"steps": WARM + 1}, rf"learner\.warm_start\.steps.* was {WARM}"),
        ({"sequences_per_step": 5}, r"learner\.warm_start\.sequences_per_step.* was 6"),
        ({"data": "other.npz"}, r"learner\.warm_start\.data.* not those that this run started"),
        (None, r"learner\.warm_start\.data"),
    ],
)
async def test_a_start_with_another_warm_start_or_without_it_is_refused(
    tmp_path: Path, change: dict[str, Any] | None, named: str
) -> None:
    given = config(tmp_path)
    await run_to_the_end(tmp_path, given)
    if change is None:
        other = make_config(tmp_path, steps=STEPS, max_staleness=0)
    else:
        if "data" in change:
            made = make_demonstrations(COUNT)
            path = write_file(tmp_path / "other.npz", [*made[1:], replace(made[0], reward=0.9)])
            change = {"data": str(path)}
        other = config(tmp_path, change)
    with pytest.raises(ConfigError, match=named):
        await run_to_the_end(tmp_path, other)
    await run_to_the_end(tmp_path, given)


async def test_a_run_that_began_without_a_warm_start_takes_none(tmp_path: Path) -> None:
    await run_to_the_end(tmp_path, make_config(tmp_path))
    with pytest.raises(ConfigError, match=r"learner\.warm_start\.data"):
        await run_to_the_end(tmp_path, config(tmp_path))


async def test_tasks_that_are_imitated_may_be_trained_on_and_are_not_evaluated(
    tmp_path: Path,
) -> None:
    # Demonstrations are of the tasks `task-0` and so on, and so are the tasks to train on.
    await run_to_the_end(tmp_path, config(tmp_path))
    path = write_tasks(tmp_path / "twins.json", 1)
    sets = {"sets": [{"name": "heldout", "tasks": str(path)}]}
    others = write_tasks(tmp_path / "tasks2.json", 6, prefix="other")
    given = config(tmp_path, eval=sets).model_copy(update={"tasks": str(others)})
    with pytest.raises(ConfigError, match="are also imitated, 'task-0' first"):
        async with learner(tmp_path / "second", given) as running:
            await asyncio.wait_for(running.task, 30)


async def test_mode_eval_replays_a_warm_start_that_was_cut_off(tmp_path: Path) -> None:
    done = 0

    def crash(name: str) -> None:
        nonlocal done
        done += name == "trained"
        if done == 2:
            raise LostRankError

    with pytest.raises(LostRankError):
        await run_to_the_end(
            tmp_path, config(tmp_path), FakeRanks(tmp_path / "weights", before=crash)
        )
    given = config(tmp_path, eval=evals(tmp_path), mode="eval")
    ranks = await run_to_the_end(tmp_path, given)
    assert [batch.step for batch in ranks.trained] == [1, 2]
    assert query(tmp_path, "SELECT moment, version FROM evals") == [("eval_only", 2)]
