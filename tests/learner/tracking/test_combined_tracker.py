"""Trackers: what they write, what a resumed run adds, and that a bad one costs nothing."""

import json
import re
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flotilla_common.process.extras import install_command
from flotilla_common.process.own_version import own_version
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_learner.config.tracking import Backend, TrackingConfig
from flotilla_learner.ports import TrackedRun
from flotilla_learner.tracking.adapters import build_trackers as build
from flotilla_learner.tracking.adapters.build_trackers import build_trackers
from flotilla_learner.tracking.adapters.jsonl import JsonlTracker
from flotilla_learner.tracking.adapters.tensorboard import TensorboardTracker
from flotilla_learner.tracking.background_tracker import BackgroundTracker
from flotilla_learner.tracking.histograms import build_histogram
from flotilla_learner.types import Histogram

NEW = TrackedRun("id")
SPREAD = {"reward/distribution": Histogram((0.0, 1.0, 2.0), (3, 1))}


class Sink:
    """Implements `Tracker`: fails or blocks as a test sets it."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.fails = False
        self.free = threading.Event()
        self.free.set()
        self.closed = False

    def open_run(self, run: TrackedRun) -> None:
        """There is nothing to open."""

    def log_metrics(
        self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        self.free.wait(10)
        if self.fails:
            raise OSError("disk full")
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


def test_points_reach_a_tracker_in_order_and_all_of_them_before_the_end() -> None:
    sink = Sink()
    tracker = BackgroundTracker(sink, "sink")
    tracker.open_run(NEW)
    for step in range(200):
        tracker.log_metrics(step, {}, {})
    tracker.close()
    assert sink.steps == list(range(200))
    assert sink.closed


def test_a_tracker_that_fails_loses_its_points_and_warns_once() -> None:
    sink = Sink()
    tracker = BackgroundTracker(sink, "sink")
    with capture_logs() as lines:
        tracker.open_run(NEW)
        sink.fails = True
        for step in range(5):
            tracker.log_metrics(step, {}, {})
        while tracker.dropped < 5:
            time.sleep(0.01)
        sink.fails = False
        tracker.log_metrics(5, {}, {})
        tracker.close()
    assert sink.steps == [5]
    assert [line["event"] for line in lines] == [
        "a tracker loses points; training continues without it",
        "a tracker accepts points again",
        "a tracker lost points",
    ]
    assert lines[0]["error"] == "OSError('disk full')"
    assert lines[2]["points"] == 5


def test_a_tracker_that_hangs_holds_up_neither_training_nor_its_end() -> None:
    sink = Sink()
    sink.free.clear()
    tracker = BackgroundTracker(sink, "sink", capacity=8, close_s=0.1)
    tracker.open_run(NEW)
    started = time.monotonic()
    for step in range(1000):
        tracker.log_metrics(step, {"a": 1.0}, {})
    tracker.close()
    assert time.monotonic() - started < 30
    # One is being written, eight wait.
    assert 1000 - 9 <= tracker.dropped <= 1000 - 8
    sink.free.set()


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_run_does_not_write_a_line_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for steps in ((1, 2), (2, 3)):
        tracker = JsonlTracker(path)
        for step in steps:
            tracker.log_metrics(step, {"policy/loss": float(step)}, SPREAD)
        tracker.log_metrics(2, {"eval/all/pass_at_1": 0.5}, {})
        tracker.close()
    written = [(line["step"], "policy/loss" in line) for line in lines_of(path)]
    assert written == [(1, True), (2, True), (2, False), (3, True)]
    assert lines_of(path)[0]["reward/distribution"] == {"edges": [0, 1, 2], "counts": [3, 1]}


def test_half_a_line_of_a_kill_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a"')
    tracker = JsonlTracker(path)
    tracker.log_metrics(2, {"a": 2.0}, {})
    tracker.close()
    assert [(line["step"], line["a"]) for line in lines_of(path)] == [(1, 1.0), (2, 2.0)]


def test_a_file_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(ConfigError, match="make it writable"):
        JsonlTracker(tmp_path / "metrics.jsonl").open_run(NEW)


def test_tensorboard_reads_scalars_and_histograms_and_each_step_once(tmp_path: Path) -> None:
    """The first start logged step 3 and was killed before the journal knew of it."""
    first = TensorboardTracker(tmp_path)
    first.open_run(NEW)
    for step in (1, 2, 3):
        first.log_metrics(step, {"policy/loss": float(step)}, SPREAD)
    first.close()
    second = TensorboardTracker(tmp_path)
    second.open_run(TrackedRun("id", resumed=True, logged_step=2))
    for step in (3, 4):
        second.log_metrics(step, {"policy/loss": 10.0 + step}, SPREAD)
    second.close()
    read = EventAccumulator(str(tmp_path)).Reload()
    scalars = [(point.step, point.value) for point in read.Scalars("policy/loss")]
    assert scalars == [(1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0)]
    (*_, spread) = read.Histograms("reward/distribution")
    assert list(spread.histogram_value.bucket_limit) == [0, 1, 2]
    assert list(spread.histogram_value.bucket) == [0, 3, 1]
    assert spread.histogram_value.sum == 0.5 * 3 + 1.5


def test_the_trackers_of_a_run_are_those_that_its_spec_lists(tmp_path: Path) -> None:
    config = TrackingConfig(backends=("jsonl", "tensorboard"))
    trackers = build_trackers(config, "run", tmp_path, {})
    trackers.open_run(NEW)
    trackers.log_metrics(1, {"policy/loss": 1.0}, {})
    trackers.close()
    assert lines_of(tmp_path / "metrics.jsonl")[0]["policy/loss"] == 1.0
    assert list((tmp_path / "tensorboard").iterdir())


def test_trackers_show_the_flotilla_that_writes_unless_the_spec_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []

    def load(*arguments: Any) -> Sink:
        shown.append(arguments[-1])
        return Sink()

    monkeypatch.setattr(build, "_load_tracker", load)
    named = {"version": "1", "commit": "c"}
    for spec in ({}, {"written_by": named}):
        build_trackers(TrackingConfig(backends=("wandb",)), "run", tmp_path, spec).close()
    assert [each["written_by"] for each in shown] == [own_version().to_dict(), named]


@pytest.mark.parametrize(
    ("backend", "package", "extra"),
    [
        ("trackio", "trackio", "trackio"),
        ("mlflow", "mlflow", "mlflow"),
        ("wandb", "flotilla_learner.tracking.adapters.wandb", "learner"),
    ],
)
def test_a_tracker_whose_package_is_missing_names_the_extra_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Backend, package: str, extra: str
) -> None:
    for name in ("MLFLOW_DISABLE_TELEMETRY", "MLFLOW_ALLOW_FILE_STORE"):
        # The adapter sets them; they end with the test.
        monkeypatch.setenv(name, "true")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=re.escape(install_command(extra))):
        build_trackers(TrackingConfig(backends=(backend,)), "run", tmp_path, {})


@pytest.mark.parametrize(
    "values",
    [{"backends": ["wanb"]}, {"backends": ["jsonl", "jsonl"]}, {"project": "a/b"}, {"mode": "x"}],
    ids=str,
)
def test_tracking_that_is_misconfigured_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse_config(TrackingConfig, values, where="test")


def test_a_histogram_of_whole_numbers_has_a_bin_for_each() -> None:
    assert build_histogram([1, 3, 3]) == Histogram((1.0, 2.0, 3.0, 4.0), (1, 0, 2))


def test_every_value_lies_in_a_bin_whose_upper_edge_is_open() -> None:
    shape = build_histogram([0.0, 0.7, 1.0, 1.0], bins=2)
    assert shape is not None
    assert shape.counts == (1, 3)
    assert shape.edges[-1] > 1.0


def test_a_histogram_of_nothing_is_none_and_leaves_out_what_is_not_finite() -> None:
    assert build_histogram([]) is None
    assert build_histogram([float("nan"), 2.5, 2.5], bins=1) == Histogram((2.5, 3.5), (2,))
