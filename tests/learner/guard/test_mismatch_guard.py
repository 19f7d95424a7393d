"""Whole runs under the guard, with ranks that report how far engines are off."""

import asyncio
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from flotilla_common.rpc import rpc
from flotilla_learner.guard.mismatch_report import REPORT_FILE, MismatchError
from flotilla_learner.journal import store
from flotilla_learner.types import Hypothesis
from tests.support.fake_ranks import FakeRanks
from tests.support.learner import FakeWorker, learner, make_config

OFF = 0.5
ROPE = Hypothesis("rope", "without policy.rope_scaling", residual=1e-7, effect=OFF)


class Ranks(FakeRanks):
    """Fake ranks that find engines `OFF` at the versions that a test chooses."""

    def __init__(self, folder: Path, off: Callable[[int], bool], **options: Any) -> None:
        super().__init__(folder, **options)
        self._off = off
        self.hypotheses = (ROPE,)

    async def compare_batch(self, batch: Any, *, diagnose: bool = False) -> Any:
        self.abs_diff = OFF if self._off(batch.step - 1) else 1e-6
        return await super().compare_batch(batch, diagnose=diagnose)


async def run(
    tmp_path: Path,
    off: Callable[[int], bool],
    *,
    worker: type[FakeWorker] = FakeWorker,
    **changes: Any,
) -> tuple[Ranks, FakeWorker]:
    """A run of 6 steps to its end; raises what ends it.

    Of the 75 tokens of a batch, more than the `MIN_TOKENS` that the guard wants of a version are
    of one, even if half of them are of the version before.
    """
    config = make_config(tmp_path, **{"steps": 6, "group_size": 5, **changes})
    ranks = Ranks(tmp_path / "weights", off)
    async with learner(tmp_path, config, ranks) as running:
        made = worker(running.address)
        async with made.working():
            await asyncio.wait_for(running.task, 60)
    return ranks, made


def query(tmp_path: Path, sql: str) -> list[Any]:
    with sqlite3.connect(tmp_path / "run" / store.JOURNAL_FILE) as db:
        return db.execute(sql).fetchall()


def report(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "run" / REPORT_FILE).read_text())


def metrics(tmp_path: Path) -> list[dict[str, Any]]:
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for line in lines if "mismatch/guard_level" in (row := json.loads(line))]


async def test_a_run_that_agrees_is_only_watched(tmp_path: Path) -> None:
    ranks, _ = await run(tmp_path, lambda version: False, max_staleness=1)
    assert len(ranks.trained) == 6
    assert {row["mismatch/guard_level"] for row in metrics(tmp_path)} == {0.0}
    assert {batch.settings.ratio_limit for batch in ranks.trained} == {None}
    assert not (tmp_path / "run" / REPORT_FILE).exists()


async def test_a_run_that_disagrees_at_its_start_trains_nothing(tmp_path: Path) -> None:
    with pytest.raises(MismatchError) as caught:
        await run(tmp_path, lambda version: True)
    text = str(caught.value)
    assert "the run does not start" in text
    assert "mean of version 0 is 0.5, the bound 0.0001" in text
    assert "without policy.rope_scaling" in text
    assert "policy.rope_scaling applied" in text, "the fix"
    assert query(tmp_path, "SELECT * FROM plans") == []
    assert query(tmp_path, "SELECT * FROM checkpoints") == []
    written = report(tmp_path)
    assert written["diagnosis"]["setting"] == "rope"
    assert written["workers"][0][0] == "w0"


async def test_a_resumed_run_checks_again(tmp_path: Path) -> None:
    await run(tmp_path, lambda version: False, steps=2)
    with pytest.raises(MismatchError, match="does not start"):
        await run(tmp_path, lambda version: True)
    assert query(tmp_path, "SELECT max(step) FROM plans") == [(2,)]


async def test_a_run_that_only_warns_continues(tmp_path: Path) -> None:
    ranks, _ = await run(tmp_path, lambda version: True, guard={"mode": "warn"})
    assert len(ranks.trained) == 6
    assert report(tmp_path)["moment"] == "start"
    assert metrics(tmp_path)[-1]["mismatch/guard_level"] > 0


async def test_a_run_without_the_guard_compares_nothing(tmp_path: Path) -> None:
    ranks, worker = await run(tmp_path, lambda version: True, guard={"mode": "off"})
    assert len(ranks.trained) == 6
    assert metrics(tmp_path) == []
    assert not any(update.probes for update in worker.updates)


async def test_a_version_over_the_bound_is_trained_on_under_a_tighter_mask(tmp_path: Path) -> None:
    ranks, _ = await run(tmp_path, lambda version: version == 2, guard={"healthy_versions": 2})
    limits = [batch.settings.ratio_limit for batch in ranks.trained]
    assert limits == [None, None, 2.0, 2.0, None, None]
    journaled = query(tmp_path, "SELECT settings FROM plans ORDER BY step")
    assert [json.loads(text)["ratio_limit"] for (text,) in journaled] == limits


async def test_a_second_version_over_it_is_sampled_again_by_reloaded_engines(
    tmp_path: Path,
) -> None:
    looks: list[int] = []

    def off(version: int) -> bool:
        """Versions 2 and 3, until engines have loaded again."""
        looks.append(version)
        return version in (2, 3) and looks.count(3) < 2

    ranks, worker = await run(tmp_path, off, max_staleness=1)
    assert looks.count(3) == 2, "the batch was sampled and judged again"
    assert [(u.policy.version, u.reload) for u in worker.updates if u.reload] == [(3, True)]
    dropped = query(tmp_path, "SELECT reason FROM groups WHERE state = 'dropped'")
    assert len(dropped) >= 3
    assert set(dropped) == {("mismatch",)}
    fresh = next(batch for batch in ranks.trained if batch.step == 4)
    assert {sequence.staleness for sequence in fresh.sequences} == {0}
    assert fresh.settings.ratio_limit == 2.0
    assert len(ranks.trained) == 6


async def test_a_run_that_stays_over_the_bound_stops_with_report_and_checkpoint(
    tmp_path: Path,
) -> None:
    with pytest.raises(MismatchError, match="the run is stopped"):
        await run(tmp_path, lambda version: version >= 2)
    written = report(tmp_path)
    assert written["moment"] == "run"
    assert written["version"] == 3
    assert [row["mismatch/guard_level"] for row in written["history"]] == [0, 0, 1, 2, 3]
    assert query(tmp_path, "SELECT max(step) FROM checkpoints") == [(3,)]


async def test_a_stopped_run_resumes_once_its_engines_are_mended(tmp_path: Path) -> None:
    """Earlier samples are dropped, and do not count against this start's engines."""
    with pytest.raises(MismatchError):
        await run(tmp_path, lambda version: version >= 2)
    looks: list[int] = []

    def before_the_stop(version: int) -> bool:
        looks.append(version)
        return len(looks) == 1

    ranks, _ = await run(tmp_path, before_the_stop)
    assert ranks.trained[-1].step == 6
    assert looks[:2] == [3, 3]
    dropped = query(tmp_path, "SELECT DISTINCT reason FROM groups WHERE state = 'dropped'")
    assert dropped == [("mismatch",)]


async def test_groups_that_were_replaced_are_dropped_with_all_else(tmp_path: Path) -> None:
    looks: list[int] = []

    def off(version: int) -> bool:
        looks.append(version)
        return version in (1, 2) and looks.count(2) < 2

    replace: dict[str, Any] = {"constant_groups": "replace", "max_refill": 40}
    await run(tmp_path, off, group_size=3, max_staleness=0, **replace)
    dropped = query(tmp_path, "SELECT reason FROM groups WHERE state = 'dropped'")
    assert len(dropped) > 3, "those of the batch, and those in whose place they were sampled"
    assert set(dropped) == {("mismatch",)}
    uncounted = "SELECT * FROM groups WHERE state = 'filtered' AND step IS NULL"
    assert query(tmp_path, uncounted) == []


async def test_the_guard_resumes_where_an_earlier_start_left_it(tmp_path: Path) -> None:
    await run(tmp_path, lambda version: version == 2, steps=3)
    ranks, _ = await run(tmp_path, lambda version: False, steps=4)
    assert [batch.settings.ratio_limit for batch in ranks.trained] == [2.0]


class WrongCanary(FakeWorker):
    """Its engine scores half a nat below the trainer, whatever it loads."""

    canary = -1.5


class WrongProbes(FakeWorker):
    """Its engine scores as the trainer does, and samples otherwise."""

    probed = -1.0


class Malformed(FakeWorker):
    """Reports logprobs that are no numbers."""

    probed = float("nan")


async def test_an_engine_whose_canary_is_wrong_twice_ends_a_run_that_has_not_begun(
    tmp_path: Path,
) -> None:
    with pytest.raises(MismatchError) as caught:
        await run(tmp_path, lambda version: True, worker=WrongCanary)
    assert "of the canary, mean of version 0 is 0.5" in str(caught.value)
    assert "Worst: w0" in str(caught.value)
    assert query(tmp_path, "SELECT * FROM trajectories") == []


async def test_an_engine_whose_probes_disagree_gets_no_work_and_ends_the_run(
    tmp_path: Path,
) -> None:
    with pytest.raises(MismatchError) as caught:
        await run(tmp_path, lambda version: True, worker=WrongProbes)
    assert "of the canary and probes" in str(caught.value)
    assert query(tmp_path, "SELECT * FROM leases") == []


async def test_an_engine_whose_probes_agree_gets_work(tmp_path: Path) -> None:
    ranks, worker = await run(tmp_path, lambda version: False, worker=WrongProbes)
    assert len(ranks.trained) == 6
    assert [bool(update.probes) for update in worker.updates] == [True] + 6 * [False]


async def test_answers_to_probes_that_cannot_be_scored_are_a_workers_bug(tmp_path: Path) -> None:
    async with learner(tmp_path, make_config(tmp_path)) as running:
        worker = Malformed(running.address)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(worker.attach(), 10)
        await worker.channel.close()
        assert not running.task.done()
    error = rpc.service_error(caught.value)
    assert error is not None
    assert error.reason == "MALFORMED_REPORT"
    assert "finite logprob" in error.message


async def test_a_canary_that_is_wrong_once_is_forgiven(tmp_path: Path) -> None:
    class Torn(FakeWorker):
        """Right once it has loaded again."""

        @property
        def canary(self) -> float:
            return -1.5 if len(self.updates) == 1 else -1.0

    ranks, worker = await run(tmp_path, lambda version: False, worker=Torn)
    assert len(ranks.trained) == 6
    assert [update.reload for update in worker.updates[:3]] == [False, True, False]
