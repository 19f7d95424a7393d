"""Logs steps to a local store of Trackio or MLflow, as a learner does, and prints its contents.

python -m tests.learner.tracking.adapters.store_process BACKEND FOLDER FIRST LAST RESUMED END

END is `kill` (without a close), `read` (prints what the store's own reader finds), `break` (the
same after two more steps, for the first of which the store fails), or `lose` (a server is down, and
every point is lost)."""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from flotilla_common.spec.public_spec import redact_spec
from flotilla_learner.config.tracking import TrackingConfig
from flotilla_learner.ports import TrackedRun, Tracker
from flotilla_learner.tracking.adapters.mlflow import MlflowTracker
from flotilla_learner.tracking.adapters.trackio import TrackioTracker
from flotilla_learner.tracking.background_tracker import BackgroundTracker
from flotilla_learner.types import Histogram
from tests.support.waiting import wait_until

SPEC = {
    "learner": {"steps": 4, "chat": {"webhook": "https://hooks.example/T0/secret"}},
    "tasks": {"a/b,c": [1, 2]},
}
PROJECT = "fleet-task-grpo"
connected: list[str] = []


def hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        connected.append(repr(arguments))


def build(backend: str, folder: Path) -> Tracker:
    config = TrackingConfig(group="tests", tags=("a",))
    kind = {"trackio": TrackioTracker, "mlflow": MlflowTracker}[backend]
    return kind(config, "my-run", folder, redact_spec(SPEC))


def point_of(step: int) -> tuple[int, dict[str, float], dict[str, Histogram]]:
    spread = Histogram((0.0, 1.0, 2.0), (3, step))
    return step, {"policy/loss": step / 2, "odd/a,b": 1.0}, {"reward/spread": spread}


def log_until_killed(tracker: Tracker, run: TrackedRun, steps: Sequence[int]) -> NoReturn:
    tracker.open_run(run)
    for step in steps:
        tracker.log_metrics(*point_of(step))
        if step == 2:
            # As an evaluation of version 2, which ends when step 2 was logged.
            tracker.log_metrics(step, {"eval/all/pass_at_1": 0.5}, {})
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it was not killed")


def read_trackio(_: Path) -> dict[str, Any]:
    # Where the tracker has imported it already, with its folder.
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    [run] = trackio.Api().runs(PROJECT)
    logs = SQLiteStorage.get_logs(PROJECT, run.name, run_id=run.id)
    return {"id": run.id, "name": run.name, "config": run.config, "points": logs}


def read_mlflow(folder: Path) -> dict[str, Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(folder.as_uri())
    experiment = client.get_experiment_by_name(PROJECT)
    assert experiment is not None
    [run] = client.search_runs([experiment.experiment_id])
    history = {
        name: [[p.step, p.value] for p in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    return {
        "name": run.info.run_name,
        "status": run.info.status,
        "params": run.data.params,
        "tags": run.data.tags,
        "history": history,
    }


class Counted:
    """Counts the points that another tracker wrote. Implements `Tracker`."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self.written = 0

    def open_run(self, run: TrackedRun) -> None:
        self._tracker.open_run(run)

    def log_metrics(
        self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        self._tracker.log_metrics(step, metrics, histograms)
        self.written += 1

    def close(self) -> None:
        self._tracker.close()


def break_store(backend: str, folder: Path) -> Callable[[], None]:
    """Make the store fail; return what mends it."""
    if backend == "trackio":
        [path] = folder.glob("*.db")
    else:
        [path] = folder.glob("*/*/metrics")
    aside = path.with_name("aside")
    path.rename(aside)
    if aside.is_dir():
        path.write_text("")
        undo: Callable[[], None] = path.unlink
    else:
        path.mkdir()
        undo = path.rmdir

    def mend() -> None:
        undo()
        aside.rename(path)

    return mend


def log_and_close(
    backend: str, folder: Path, run: TrackedRun, steps: Sequence[int], *, fails: bool
) -> int:
    """Log steps, and two more if the store fails: for the first of them alone. Return how many
    points were lost."""
    counted = Counted(build(backend, folder))
    tracker = BackgroundTracker(counted, backend)
    tracker.open_run(run)
    for step in steps:
        tracker.log_metrics(*point_of(step))
    if fails:
        wait_until(lambda: counted.written == len(steps))
        mend = break_store(backend, folder)
        tracker.log_metrics(*point_of(steps[-1] + 1))
        wait_until(lambda: tracker.dropped == 1)
        mend()
        tracker.log_metrics(*point_of(steps[-1] + 2))
    tracker.close()
    return tracker.dropped


def lose_all(backend: str, folder: Path, run: TrackedRun) -> int:
    tracker = BackgroundTracker(build(backend, folder), backend)
    tracker.open_run(run)
    for step in (1, 2):
        tracker.log_metrics(step, {"policy/loss": 0.5}, {})
    wait_until(lambda: tracker.dropped == 2)
    tracker.close()
    return tracker.dropped


def main(backend: str, folder: Path, first: int, last: int, *, resumed: bool, end: str) -> None:
    sys.addaudithook(hear)
    run = TrackedRun("0123abcd", resumed=resumed, logged_step=first - 1)
    if end == "lose":
        print(json.dumps({"lost": lose_all(backend, folder, run), "connected": connected}))
        return
    if end == "kill":
        log_until_killed(build(backend, folder), run, range(first, last + 1))
    lost = log_and_close(backend, folder, run, range(first, last + 1), fails=end == "break")
    found = {"trackio": read_trackio, "mlflow": read_mlflow}[backend](folder)
    print(json.dumps({**found, "connected": connected, "lost": lost}, default=str))


if __name__ == "__main__":
    given = sys.argv[1:]
    main(
        given[0],
        Path(given[1]),
        int(given[2]),
        int(given[3]),
        resumed=given[4] == "resumed",
        end=given[5],
    )
