"""Whole runs of a learner with fake ranks: evaluation alone, and going on after a stop."""

import asyncio
import json
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, JournalError
from flotilla_common.weights.fingerprint import TokenizerDigests
from flotilla_learner.app import run_learner
from flotilla_learner.dependencies import LearnerDependencies
from flotilla_learner.tracking.adapters.jsonl import JsonlTracker
from tests.support.fake_ranks import FakeRanks
from tests.support.learner import (
    TOKENIZER,
    FakeWorker,
    graded,
    learner,
    make_config,
    make_runtime,
    write_tasks,
)

HELDOUT = 4


def eval_sets(tmp_path: Path) -> dict[str, Any]:
    path = write_tasks(tmp_path / "heldout.json", HELDOUT, prefix="heldout")
    sets = [
        {"name": "heldout", "tasks": str(path)},
        {"name": "greedy", "tasks": str(path), "temperature": 0.0, "when": ["after"]},
    ]
    return {"sets": sets}


async def run_to_the_end(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """A whole start of the learner with a willing worker; returns the summary."""
    async with (
        learner(tmp_path, make_config(tmp_path, **changes)) as running,
        FakeWorker(running.address).working(),
    ):
        await asyncio.wait_for(running.task, 90)
    return json.loads((tmp_path / "run" / "summary.json").read_text())


def query(tmp_path: Path, sql: str) -> list[Any]:
    with sqlite3.connect(tmp_path / "run" / JOURNAL_FILE) as db:
        return db.execute(sql).fetchall()


async def test_mode_eval_evaluates_a_finished_runs_newest_policy_on_all_sets(
    tmp_path: Path,
) -> None:
    trained = await run_to_the_end(tmp_path, eval=eval_sets(tmp_path))
    summary = await run_to_the_end(tmp_path, eval=eval_sets(tmp_path), mode="eval")
    assert summary["eval"]["eval_only"]["tasks"] == HELDOUT
    assert summary["eval"]["eval_only"]["greedy_pass_at_1"] is not None
    assert summary["eval"]["before"] == trained["eval"]["before"]
    assert summary["eval"]["after"] == trained["eval"]["after"]
    assert summary["steps"] == 3
    assert summary["trajectories"]["trained"] == trained["trajectories"]["trained"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert last["step"] == 3
    assert "eval/all/pass_at_1" in last


async def test_mode_eval_of_a_new_run_evaluates_the_initial_policy(tmp_path: Path) -> None:
    summary = await run_to_the_end(tmp_path, eval=eval_sets(tmp_path), mode="eval")
    assert summary["steps"] == 0
    assert summary["eval"]["eval_only"]["tasks"] == HELDOUT
    assert query(tmp_path, "SELECT * FROM checkpoints") == []
    assert query(tmp_path, "SELECT * FROM groups WHERE purpose = 'train'") == []


async def test_mode_eval_leaves_work_that_was_begun_for_the_next_start(tmp_path: Path) -> None:
    async with following(tmp_path, eval=eval_sets(tmp_path)) as worker:
        lease = await lease_for(worker, pb.PURPOSE_TRAIN)
        await worker.submit(graded(lease, lease.attempts[0], worker.policy))
    await run_to_the_end(tmp_path, eval=eval_sets(tmp_path), mode="eval")
    assert query(tmp_path, "SELECT state FROM groups WHERE purpose = 'train'") == [("open",)]
    summary = await run_to_the_end(tmp_path, eval=eval_sets(tmp_path))
    assert summary["trajectories"]["trained"] == 3 * 3 * 2


async def test_mode_eval_without_sets_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learner\.eval\.sets"):
        await run_to_the_end(tmp_path, mode="eval")


@asynccontextmanager
async def following(tmp_path: Path, **changes: Any) -> AsyncGenerator[FakeWorker]:
    """A learner, and a worker that does nothing by itself; both are gone at the end."""
    sees = bool(changes.pop("sees_pictures", False))
    async with learner(tmp_path, make_config(tmp_path, **changes), sees_pictures=sees) as running:
        worker = FakeWorker(running.address)
        attached = asyncio.create_task(worker.attach())
        await asyncio.wait_for(worker.updated.wait(), 10)
        yield worker
        attached.cancel()
        await asyncio.gather(attached, return_exceptions=True)
        await worker.channel.close()


async def lease_for(worker: FakeWorker, purpose: pb.Purpose.ValueType) -> pb.Lease:
    while lease := await worker.poll():
        if lease.purpose == purpose:
            return lease
    raise AssertionError("no lease")


async def rows_of(folder: Path, sql: str) -> None:
    """Wait until there are some."""
    for _ in range(1000):
        if query(folder, sql):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"nothing after 10 s: {sql}")


async def train_one_step_before_the_evaluation_ends(worker: FakeWorker, folder: Path) -> None:
    for _ in range(3):
        await worker.play(await lease_for(worker, pb.PURPOSE_TRAIN))
    await rows_of(folder, "SELECT * FROM plans")


async def test_an_evaluation_that_a_crash_cut_off_is_done_before_the_replay(
    tmp_path: Path,
) -> None:
    async with following(tmp_path, eval=eval_sets(tmp_path)) as worker:
        await train_one_step_before_the_evaluation_ends(worker, tmp_path)
    summary = await run_to_the_end(tmp_path, eval=eval_sets(tmp_path))
    assert summary["eval"]["before"]["tasks"] == HELDOUT
    assert summary["eval"]["before"]["missing"] == 0
    (row,) = query(tmp_path, "SELECT version FROM evals WHERE moment = 'before'")
    assert row == (0,)


async def test_a_drain_does_not_wait_for_an_evaluation_and_the_next_start_does_it(
    tmp_path: Path,
) -> None:
    async with learner(tmp_path, make_config(tmp_path, eval=eval_sets(tmp_path))) as running:
        worker = FakeWorker(running.address)
        attached = asyncio.create_task(worker.attach())
        await asyncio.wait_for(worker.updated.wait(), 10)
        await train_one_step_before_the_evaluation_ends(worker, tmp_path)
        running.runtime.drain.set()
        await asyncio.wait_for(running.task, 5)
        await asyncio.gather(attached, return_exceptions=True)
        await worker.channel.close()
    summary = await run_to_the_end(tmp_path, eval=eval_sets(tmp_path))
    assert summary["eval"]["before"]["missing"] == 0
    assert summary["steps"] == 3


async def test_an_evaluation_past_eval_hold_is_reported_with_what_is_missing(
    tmp_path: Path,
) -> None:
    held = {**eval_sets(tmp_path), "hold_s": 0.2}
    async with learner(tmp_path, make_config(tmp_path, eval=held)) as running:
        worker = FakeWorker(running.address)
        attached = asyncio.create_task(worker.attach())
        await asyncio.wait_for(worker.updated.wait(), 10)
        await worker.play(await lease_for(worker, pb.PURPOSE_EVAL))
        await train_one_step_before_the_evaluation_ends(worker, tmp_path)
        await rows_of(tmp_path, "SELECT * FROM evals")
        attached.cancel()
        await asyncio.gather(attached, return_exceptions=True)
        await worker.channel.close()
    ((text,),) = query(tmp_path, "SELECT results FROM evals")
    report = json.loads(text)["heldout"]
    assert (report["tasks"], report["missing"]) == (1, HELDOUT - 1)
    dropped = query(tmp_path, "SELECT DISTINCT reason FROM groups WHERE purpose = 'eval'")
    assert ("eval_hold",) in dropped


async def test_progress_of_an_evaluation_is_in_the_status(tmp_path: Path) -> None:
    async with following(tmp_path, eval=eval_sets(tmp_path)) as worker:
        metrics = (await worker.groups.GetStatus(pb.GetStatusRequest())).metrics
        assert (metrics["eval/progress_done"], metrics["eval/progress_total"]) == (0, HELDOUT)
        await worker.play(await lease_for(worker, pb.PURPOSE_EVAL))
        metrics = (await worker.groups.GetStatus(pb.GetStatusRequest())).metrics
        assert (metrics["eval/progress_done"], metrics["eval/progress_total"]) == (1, HELDOUT)


async def start(tmp_path: Path, tokenizer: bytes = TOKENIZER, **changes: Any) -> None:
    runtime = make_runtime(tmp_path, make_config(tmp_path, **changes), listen="127.0.0.1:0")
    with closing(JsonlTracker(tmp_path / "run" / "metrics.jsonl")) as tracker:
        await run_learner(
            runtime,
            LearnerDependencies(
                FakeRanks(tmp_path / "weights"), tracker, TokenizerDigests(tokenizer)
            ),
        )


async def test_a_run_does_not_resume_with_another_tokenizer(tmp_path: Path) -> None:
    await run_to_the_end(tmp_path)
    with pytest.raises(ConfigError, match="its tokenizer is not the one"):
        await start(tmp_path, b"x" * 32)


async def test_a_run_does_not_resume_without_tasks_that_it_has_sampled(tmp_path: Path) -> None:
    await run_to_the_end(tmp_path)
    others = write_tasks(tmp_path / "others.json", prefix="other")
    with pytest.raises(ConfigError, match=r"tasks that the run has sampled are gone"):
        await start(tmp_path, tasks=str(others))


async def test_a_run_resumes_with_more_tasks_and_logs_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    await run_to_the_end(tmp_path)
    more = write_tasks(tmp_path / "more.json", 20)
    await start(tmp_path, tasks=str(more))
    out, err = capfd.readouterr()
    assert "learner.tasks, with learner.select, is not what the run started with" in out + err


async def test_a_run_does_not_resume_with_a_selection_that_leaves_out_what_it_sampled(
    tmp_path: Path,
) -> None:
    await run_to_the_end(tmp_path)
    with pytest.raises(ConfigError, match=r"restore the file and the selection"):
        await start(tmp_path, select={"env_keys": ["env0"]})


async def test_a_run_resumes_with_a_wider_selection_and_logs_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chosen = {"env_keys": ["env0", "env1"], "max_tasks": 5}
    await run_to_the_end(tmp_path, select=chosen)
    assert len(query(tmp_path, "SELECT DISTINCT json_extract(spec, '$.task[0]') FROM groups")) <= 5
    await start(tmp_path, select=chosen)
    begun = "".join(capfd.readouterr())
    await start(tmp_path, select={**chosen, "max_tasks": 7})
    wider = "".join(capfd.readouterr())
    message = "learner.tasks, with learner.select, is not what the run started with"
    assert (message in begun, message in wider) == (False, True)


async def test_a_learner_whose_disk_refuses_ends_instead_of_waiting(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot write"):
        async with learner(tmp_path, make_config(tmp_path)) as running:
            worker = FakeWorker(running.address)
            attached = asyncio.create_task(worker.attach())
            await asyncio.wait_for(worker.updated.wait(), 10)
            with sqlite3.connect(tmp_path / "run" / JOURNAL_FILE) as db:
                db.execute("DROP TABLE leases")
            polled = asyncio.create_task(worker.poll())
            try:
                await asyncio.wait_for(asyncio.shield(running.task), 10)
            finally:
                for task in (attached, polled):
                    task.cancel()
                await asyncio.gather(attached, polled, return_exceptions=True)
                await worker.channel.close()
