"""The trackers of a run, as its spec lists them. Each vendor is imported where it is listed."""

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
from services.learner.tracking.public_spec import public
from services.learner.tracking.trackers import Trackers

METRICS_FILE = "metrics.jsonl"


def trackers_of(
    config: TrackingConfig, run_id: str, run_dir: Path, spec: Mapping[str, Any]
) -> Trackers:
    """Raises ConfigError for a package that is not installed and a file that is not writable."""

    def made(backend: Backend) -> Tracker:
        match backend:
            case "console":
                return ConsoleTracker()
            case "jsonl":
                tracker: Tracker = JsonlTracker(run_dir / METRICS_FILE)
            case "tensorboard":
                module = _module("tensorboard")
                tracker = module.TensorboardTracker(run_dir / "tensorboard")
            case "wandb":
                module = _module("wandb")
                tracker = module.WandbTracker(config, run_id, run_dir, public(spec))
        return BackgroundTracker(tracker, backend)

    return Trackers([made(backend) for backend in config.backends])


def _module(vendor: str) -> Any:
    try:
        return importlib.import_module(f"services.learner.tracking.adapters.{vendor}")
    except ImportError as error:
        raise ConfigError(
            f"learner.tracking.backends: {vendor} is not installed ({error}); install the"
            f" `learner` extra, or leave {vendor!r} out"
        ) from error
