"""Whole runs whose engine is given adapters alone: it samples what the trainer computes, whenever
it has come."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.e2e.finished_run import FinishedRun, train, write_spec
from tests.support.launcher import left_running
from tests.support.process_commands import command_of
from tests.support.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(560)]

STEPS = 3
TOLERANCE = 1e-4
LIMIT_S = 500.0
ADAPTERS = ("--learner.lora.rank=8", "--policy.adapter_rank=8", "--learner.optimizer.lr=1e-3")


def check_adapted_run(run: FinishedRun) -> None:
    """Each policy differs from the one before, and is sampled as the trainer computes it."""
    assert run.exit_code == 0, run.output[-4000:]
    worst = run.metrics("mismatch/audit_abs_diff_max")
    assert worst
    assert all(record["mismatch/audit_abs_diff_max"] < TOLERANCE for record in worst)
    assert all(record["policy/grad_norm"] > 0 for record in run.metrics("policy/grad_norm"))
    assert len(set(run.rows("SELECT fingerprint FROM publications"))) == STEPS + 1


def test_a_run_is_trained_on_what_its_engine_samples_with_adapters_alone(
    quick_policy: Path, tmp_path: Path
) -> None:
    spec = write_spec(tmp_path, quick_policy, steps=STEPS)
    run = train(spec, tmp_path / "runs", *ADAPTERS, timeout_s=LIMIT_S)
    check_adapted_run(run)
    assert (run.folder / "logs/rollout-0.log").read_text().count("policy loaded") >= STEPS + 1


async def test_a_rollout_that_joins_in_the_middle_samples_with_the_newest_adapters(
    quick_policy: Path, tmp_path: Path
) -> None:
    """Its first policy is one that training has moved off the base."""
    spec, runs = write_spec(tmp_path, quick_policy, steps=STEPS), tmp_path / "runs"
    running = asyncio.create_task(
        asyncio.to_thread(train, spec, runs, *ADAPTERS, timeout_s=LIMIT_S)
    )
    await until(lambda: running.done() or published(runs) > 0, LIMIT_S)
    assert not running.done(), running.result().output[-4000:]
    for process in left_running(runs):
        if "flotilla_rollout" in command_of(process):
            process.kill()
    run = await running
    check_adapted_run(run)
    log = (run.folder / "logs/rollout-0.log").read_text()
    loaded = [line for line in log.splitlines() if "policy loaded" in line]
    assert sum('"policy": "1:0"' in line for line in loaded) == 1, loaded


def published(runs: Path) -> int:
    """The newest version of the only run's policy; 0 before there is one that was trained."""
    for journal in runs.glob("*/journal.sqlite"):
        with closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as db:
            try:
                return db.execute("SELECT max(version) FROM publications").fetchone()[0] or 0
            except sqlite3.OperationalError:
                # The learner is just making its tables.
                return 0
    return 0
