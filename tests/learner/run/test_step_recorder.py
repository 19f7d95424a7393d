"""Each step is logged once, over all starts of a run; alarms reach the status and the sinks."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla.learner.v1 import trajectory_pb2
from flotilla_learner.ports import TrackedRun
from flotilla_learner.tracking.adapters.jsonl import JsonlTracker
from flotilla_learner.types import Histogram
from tests.learner.tracking.tracked_learner import run_with
from tests.support.alarm_steps import Heard
from tests.support.fake_ranks import FakeRanks
from tests.support.learner import FakeWorker, failed


class Opened(JsonlTracker):
    """Remembers how it was opened, and every name that it was given."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.run: TrackedRun | None = None
        self.shapes: set[str] = set()

    def open_run(self, run: TrackedRun) -> None:
        self.run = run

    def log_metrics(
        self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        self.shapes |= histograms.keys()
        super().log_metrics(step, metrics, histograms)


class Crash(Exception):
    """An error with which a test makes a rank fail."""


def crash_at(tmp_path: Path, moment: str, count: int) -> FakeRanks:
    """Ranks that fail as they begin something for the `count`-th time."""
    left = count

    def before(name: str) -> None:
        nonlocal left
        left -= name == moment
        if not left:
            raise Crash

    return FakeRanks(tmp_path / "weights", before=before)


def steps_of(tmp_path: Path, name: str) -> list[int]:
    """The steps of the lines with this metric."""
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return [point["step"] for line in lines if name in (point := json.loads(line))]


def tracker_of(tmp_path: Path) -> Opened:
    return Opened(tmp_path / "run" / "metrics.jsonl")


async def test_steps_that_a_resumed_run_replays_are_not_logged_again(tmp_path: Path) -> None:
    first, second = tracker_of(tmp_path), None
    with pytest.raises(Crash):
        await run_with(tmp_path, first, ranks=crash_at(tmp_path, "train", 3))
    assert steps_of(tmp_path, "policy/loss") == [1, 2]
    second = tracker_of(tmp_path)
    await run_with(tmp_path, second)
    # Step 3 was planned and never trained: its replay is its first training.
    assert steps_of(tmp_path, "policy/loss") == [1, 2, 3, 4]
    assert steps_of(tmp_path, "timing/step") == [1, 2, 4]
    assert first.run is not None
    assert second.run == TrackedRun(first.run.tracker_id, resumed=True, logged_step=2, run_id="run")


async def test_a_step_that_was_trained_and_not_logged_is_logged_by_its_replay(
    tmp_path: Path,
) -> None:
    # The third publication is that of step 2.
    with pytest.raises(Crash):
        await run_with(tmp_path, tracker_of(tmp_path), ranks=crash_at(tmp_path, "publish", 3))
    assert steps_of(tmp_path, "policy/loss") == [1]
    await run_with(tmp_path, tracker_of(tmp_path))
    assert steps_of(tmp_path, "policy/loss") == [1, 2, 3, 4]


async def test_a_learner_logs_how_its_attempts_are_spread(tmp_path: Path) -> None:
    tracker = tracker_of(tmp_path)
    await run_with(tmp_path, tracker, steps=1)
    assert tracker.shapes >= {
        "reward/distribution",
        "environment/turns",
        "environment/policy_tokens",
        "environment/episode_seconds",
        "async/staleness",
    }


async def test_a_step_shows_what_the_run_costs_and_all_that_it_has_received(
    tmp_path: Path,
) -> None:
    reported = {"cost/accrued": 1.5, "cost/per_hour": 6.0, "cost/per_1000_trajectories": 20.0}
    await run_with(tmp_path, tracker_of(tmp_path), steps=1, reported=reported)
    await run_with(tmp_path, tracker_of(tmp_path), steps=2, reported=reported)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    points = [point for line in lines if "timing/step" in (point := json.loads(line))]
    assert [point["step"] for point in points] == [1, 2]
    assert all(point[name] == value for point in points for name, value in reported.items())
    first, second = (point["throughput/trajectories"] for point in points)
    assert 0 < first < second


async def test_a_run_that_fails_raises_an_alarm(tmp_path: Path) -> None:
    heard = Heard()
    with pytest.raises(Crash):
        await run_with(
            tmp_path, tracker_of(tmp_path), ranks=crash_at(tmp_path, "train", 1), heard=heard
        )
    assert heard.names == ["+run_failed/all"]
    assert heard.alarms[0].verdict.cause == "Crash()"


class UnluckyWorker(FakeWorker):
    """Every environment of it is lost."""

    async def play(self, lease: pb.Lease) -> None:
        for attempt in lease.attempts:
            await self.submit(failed(lease, attempt, trajectory_pb2.FAILURE_KIND_ENV_LOST))


async def raised(worker: FakeWorker) -> None:
    """Wait until the status shows that an environment fails."""
    name = "alarms/failing_environment/env0"
    while True:
        status = await worker.groups.GetStatus(pb.GetStatusRequest())
        if name in status.metrics:
            return
        await asyncio.sleep(0.05)


async def test_an_environment_that_always_fails_raises_an_alarm_before_any_step_ends(
    tmp_path: Path,
) -> None:
    heard = Heard()
    await run_with(
        tmp_path,
        tracker_of(tmp_path),
        worker=UnluckyWorker,
        until=raised,
        heard=heard,
        max_tries=1,
        alarms={"failing_tries": 2},
    )
    verdicts = {alarm.verdict.scope: alarm.verdict for alarm in heard.alarms}
    assert "all failed" in verdicts["env0"].cause
    assert "with: env_lost" in verdicts["env0"].cause
