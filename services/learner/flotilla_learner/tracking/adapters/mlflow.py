"""Metrics in MLflow: files in the run's folder, or the server that MLFLOW_TRACKING_URI names."""

import importlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.telemetry.log import get_logger
from flotilla_common.text.redaction import add_secret
from flotilla_learner.config.tracking import TrackingConfig
from flotilla_learner.ports import TrackedRun
from flotilla_learner.types import Histogram

_log = get_logger(__name__)
_URI = "MLFLOW_TRACKING_URI"
_TAG = "flotilla.tracker_id"
# MLflow's own limits on one request.
_METRICS, _PARAMS, _KEY, _VALUE = 1000, 100, 250, 6000
# Newest points of a metric that a resumed run may log again.
_REMEMBERED = 64
_REFUSED = re.compile(r"[^\w\-. :/]", re.ASCII)


class MlflowTracker:
    """One run of an experiment, found by its tag at every later start. Implements `Tracker`.

    MLflow has no histograms: they are left out. Only the tracker's thread contacts a server, so
    that an unavailable one costs points but not the start of a run."""

    def __init__(
        self, config: TrackingConfig, name: str, folder: Path, spec: Mapping[str, Any]
    ) -> None:
        """Create it; `spec` is shown as the run's parameters and holds no secrets.

        Raises ImportError without the package."""
        self._config = config
        self._name = name
        self._params = dict(_flatten_spec(spec))
        self._uri = os.environ.get(_URI) or folder.absolute().as_uri()
        if password := urlsplit(self._uri).password:
            # MLflow's errors quote the address.
            add_secret(password)
        self._mlflow = _import_mlflow()
        self._client: Any = None
        self._run: TrackedRun | None = None
        self._run_id = ""
        # Steps that an earlier start logged last, by metric; empty for a new run.
        self._known: dict[str, set[int]] = {}
        self._continued = False

    def open_run(self, run: TrackedRun) -> None:
        """Begin or continue the run; for a server, later. Raises ConfigError if MLflow refuses
        its store, or cannot write it."""
        self._run = run
        try:
            self._client = self._mlflow.tracking.MlflowClient(self._uri)
            if urlsplit(self._uri).scheme not in ("http", "https"):
                self._begin_run()
        except (OSError, ImportError, self._mlflow.exceptions.MlflowException) as error:
            raise ConfigError(
                f"learner.tracking: mlflow cannot open {_without_login(self._uri)}: {error};"
                f" make it writable, or correct {_URI}"
            ) from error
        _log.info("mlflow stores the metrics", store=_without_login(self._uri))

    def log_metrics(
        self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        """Write a point, without the metrics that the run already has for its step. Raises
        MLflow's errors."""
        if not self._run_id:
            self._begin_run()
        now = int(time.time() * 1000)
        named = ((_REFUSED.sub("_", name), value) for name, value in metrics.items())
        entities = self._mlflow.entities
        points = [
            entities.Metric(name, value, now, step)
            for name, value in named
            if step not in self._steps_of(name)
        ]
        for part in _split_parts(points, _METRICS):
            self._client.log_batch(self._run_id, metrics=part, synchronous=True)

    def close(self) -> None:
        """Mark the run as finished; a later start can still continue it."""
        if self._run_id:
            self._client.set_terminated(self._run_id)

    def _begin_run(self) -> None:
        assert self._run is not None
        experiment = self._find_experiment()
        where = f"tags.`{_TAG}` = '{self._run.tracker_id}'"
        found = self._client.search_runs([experiment], where, max_results=1)
        if found:
            run = found[0]
            self._client.update_run(run.info.run_id, status="RUNNING")
        else:
            tags = {_TAG: self._run.tracker_id, **dict.fromkeys(self._config.tags, "")}
            if self._config.group:
                tags["group"] = self._config.group
            run = self._client.create_run(experiment, tags=tags, run_name=self._name)
        self._log_params(run)
        self._continued = bool(found)
        self._run_id = run.info.run_id

    def _find_experiment(self) -> str:
        experiment = self._client.get_experiment_by_name(self._config.project)
        if experiment is not None:
            return experiment.experiment_id
        return self._client.create_experiment(self._config.project)

    def _log_params(self, run: Any) -> None:
        """Log the parameters that the run lacks: MLflow refuses to change one."""
        entities = self._mlflow.entities
        params = [
            entities.Param(name, value)
            for name, value in self._params.items()
            if name not in run.data.params
        ]
        for part in _split_parts(params, _PARAMS):
            self._client.log_batch(run.info.run_id, params=part, synchronous=True)

    def _steps_of(self, name: str) -> set[int]:
        """Return the newest steps of a metric that earlier starts logged."""
        if not self._continued:
            return set()
        if name not in self._known:
            history = self._client.get_metric_history(self._run_id, name)
            self._known[name] = set(sorted({point.step for point in history})[-_REMEMBERED:])
        return self._known[name]


def _import_mlflow() -> Any:
    """Import MLflow without its telemetry, which starts on import, and with its file store,
    which is behind a switch because MLflow prefers databases."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    return importlib.import_module("mlflow")


def _flatten_spec(spec: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of nested tables by dotted names, as MLflow's parameters are flat."""
    for key, value in spec.items():
        name = f"{prefix}{_REFUSED.sub('_', str(key)).replace('/', '_')}"
        if isinstance(value, Mapping):
            yield from _flatten_spec(value, f"{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            yield name[:_KEY], text[:_VALUE]


def _split_parts(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while part := list(islice(rest, size)):
        yield part


def _without_login(uri: str) -> str:
    return re.sub(r"(?<=://)[^/@\s]+(?=@)", "***", uri)
