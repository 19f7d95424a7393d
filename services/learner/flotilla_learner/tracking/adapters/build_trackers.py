"""Construction of a run's trackers from its spec. Only listed vendors are imported."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flotilla_common.process.extras import install_command
from flotilla_common.process.own_version import own_version
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.run_folder.metric_lines import METRICS_FILE
from flotilla_common.spec.public_spec import redact_spec
from flotilla_learner.config.tracking import Backend, TrackingConfig
from flotilla_learner.ports import TrackedRun, Tracker
from flotilla_learner.tracking.adapters.console import ConsoleTracker
from flotilla_learner.tracking.adapters.jsonl import JsonlTracker
from flotilla_learner.tracking.background_tracker import BackgroundTracker
from flotilla_learner.types import Histogram


class CompositeTracker(Tracker):
    """Passes everything to each of its trackers."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = trackers

    def open_run(self, run: TrackedRun) -> str | None:
        urls = [tracker.open_run(run) for tracker in self._trackers]
        return next(filter(None, urls), None)

    def log_metrics(
        self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        for tracker in self._trackers:
            tracker.log_metrics(step, metrics, histograms)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def build_trackers(
    config: TrackingConfig, run_id: str, run_dir: Path, spec: Mapping[str, Any]
) -> CompositeTracker:
    """Build the trackers of a run.

    Raises ConfigError for a missing package or an unwritable file."""
    shown = redact_spec({"written_by": own_version().to_dict(), **spec})

    def build_tracker(backend: Backend) -> Tracker:
        folder = run_dir / backend
        match backend:
            case "console":
                return ConsoleTracker()
            case "jsonl":
                tracker: Tracker = JsonlTracker(run_dir / METRICS_FILE)
            case "tensorboard":
                tracker = _load_tracker(backend, "TensorboardTracker", folder)
            case "wandb":
                tracker = _load_tracker(backend, "WandbTracker", config, run_id, run_dir, shown)
            case "trackio":
                tracker = _load_tracker(backend, "TrackioTracker", config, run_id, folder, shown)
            case "mlflow":
                tracker = _load_tracker(backend, "MlflowTracker", config, run_id, folder, shown)
        return BackgroundTracker(tracker, backend)

    return CompositeTracker([build_tracker(backend) for backend in config.backends])


def _load_tracker(vendor: Backend, name: str, *arguments: Any) -> Tracker:
    """Import a vendor's adapter, and make the tracker `name` of it. Raises ConfigError."""
    try:
        module = importlib.import_module(f"flotilla_learner.tracking.adapters.{vendor}")
        return getattr(module, name)(*arguments)
    except ImportError as error:
        extra = vendor if vendor in ("trackio", "mlflow") else "learner"
        raise ConfigError(
            f"learner.tracking.backends: {vendor} is not installed ({error}); install it with"
            f" {install_command(extra)}, or leave {vendor!r} out"
        ) from error
