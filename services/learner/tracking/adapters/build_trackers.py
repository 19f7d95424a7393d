"""Construction of a run's trackers from its spec. Only listed vendors are imported."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError
from services.learner.config.tracking import Backend, TrackingConfig
from services.learner.ports import Tracker
from services.learner.tracking.adapters.console import ConsoleTracker
from services.learner.tracking.adapters.jsonl import JsonlTracker
from services.learner.tracking.background_tracker import BackgroundTracker
from services.learner.tracking.combined_tracker import CompositeTracker
from services.learner.tracking.public_spec import redact_spec

METRICS_FILE = "metrics.jsonl"


def build_trackers(
    config: TrackingConfig, run_id: str, run_dir: Path, spec: Mapping[str, Any]
) -> CompositeTracker:
    """Build the trackers of a run.

    Raises ConfigError for a package that is not installed and a file that is not writable."""

    def build_tracker(backend: Backend) -> Tracker:
        match backend:
            case "console":
                return ConsoleTracker()
            case "jsonl":
                tracker: Tracker = JsonlTracker(run_dir / METRICS_FILE)
            case "tensorboard":
                module = _import_adapter("tensorboard")
                tracker = module.TensorboardTracker(run_dir / "tensorboard")
            case "wandb":
                module = _import_adapter("wandb")
                tracker = module.WandbTracker(config, run_id, run_dir, redact_spec(spec))
        return BackgroundTracker(tracker, backend)

    return CompositeTracker([build_tracker(backend) for backend in config.backends])


def _import_adapter(vendor: str) -> Any:
    try:
        return importlib.import_module(f"services.learner.tracking.adapters.{vendor}")
    except ImportError as error:
        raise ConfigError(
            f"learner.tracking.backends: {vendor} is not installed ({error}); install the"
            f" `learner` extra, or leave {vendor!r} out"
        ) from error
