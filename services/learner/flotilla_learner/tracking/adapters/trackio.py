"""Metrics in Trackio's local SQLite store, which `trackio show` serves as a dashboard."""

import importlib
import json
import os
import sqlite3
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flotilla_common.process.child_environment import seen_by_children
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.telemetry.log import get_logger
from flotilla_learner.config.tracking import TrackingConfig
from flotilla_learner.ports import TrackedRun, Tracker
from flotilla_learner.types import Histogram

_log = get_logger(__name__)
_FOLDER = "TRACKIO_DIR"
# Newest points of a store that a resumed run may log again.
_REMEMBERED = 64


class TrackioTracker(Tracker):
    """One run of a project, continued under its id by every start.

    Writes each point to the store itself: `trackio.log` would do so in its own thread, where a
    failure is only a warning and loses points uncounted."""

    def __init__(
        self, config: TrackingConfig, name: str, folder: Path, spec: Mapping[str, Any]
    ) -> None:
        """Open the store: `folder`, unless TRACKIO_DIR names another. `spec` is shown as the
        run's config and holds no secrets.

        Raises ImportError without the package, and ConfigError if the store is not writable or
        Trackio refuses the project's name."""
        self._project = config.project
        self._name = name
        self._folder = Path(os.environ.get(_FOLDER) or folder)
        self._config: dict[str, Any] | None = {
            **spec,
            "_Created": datetime.now(UTC).isoformat(),
            "_Group": config.group,
        }
        self._id = ""
        # Metric names in the newest points of earlier starts, by step.
        self._known: dict[int, set[str]] = {}
        self._store, self._histogram_type = _import_trackio(self._folder)
        try:
            self._store.validate_project_name(self._project)
            # The name of a Space or bucket in the environment would make this download it.
            with seen_by_children():
                self._store.init_db(self._project)
        except ValueError as error:
            raise ConfigError(f"learner.tracking.project: trackio refuses it: {error}") from error
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"learner.tracking: trackio cannot write {self._folder}: {error}; make it writable"
            ) from error

    def open_run(self, run: TrackedRun) -> None:
        """Read the last points of earlier starts."""
        self._id = run.tracker_id
        if run.resumed:
            self._known = self._read_known()
        _log.info("trackio stores the metrics", folder=str(self._folder), project=self._project)

    def log_metrics(
        self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        """Write a point, without the metrics that the store already has for its step. Raises the
        store's errors."""
        point: dict[str, Any] = dict(metrics)
        for name, shape in histograms.items():
            point[name] = {
                "_type": self._histogram_type,
                "bins": list(shape.edges),
                "values": list(shape.counts),
            }
        known = self._known.get(step, set())
        point = {name: value for name, value in point.items() if name not in known}
        if not point:
            return
        self._store.bulk_log(
            project=self._project,
            run=self._name,
            run_id=self._id,
            metrics_list=[point],
            steps=[step],
            config=self._config,
        )
        # The store has the config from the first point on.
        self._config = None

    def _read_known(self) -> dict[int, set[str]]:
        quoted = self._id.replace("'", "''")
        newest = self._store.query_project(
            self._project,
            f"SELECT step, metrics FROM metrics WHERE run_id = '{quoted}'"
            f" ORDER BY id DESC LIMIT {_REMEMBERED}",
        )
        known: dict[int, set[str]] = {}
        for row in newest["rows"]:
            known.setdefault(row["step"], set()).update(json.loads(row["metrics"]))
        return known


def _import_trackio(folder: Path) -> tuple[Any, str]:
    """Import the store and the name of its histograms. Trackio reads its folder from the
    environment, once, on import."""
    before = os.environ.get(_FOLDER)
    os.environ[_FOLDER] = str(folder)
    try:
        trackio = importlib.import_module("trackio")
        storage = importlib.import_module("trackio.sqlite_storage")
    finally:
        if before is None:
            del os.environ[_FOLDER]
        else:
            os.environ[_FOLDER] = before
    return storage.SQLiteStorage, trackio.Histogram.TYPE
