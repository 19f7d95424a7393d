"""The trackers of a run, as its spec lists them. Each vendor is imported where it is listed."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError
from services.learner.adapters.trackers_console import ConsoleTracker
from services.learner.adapters.trackers_jsonl import JsonlTracker
from services.learner.metrics.background import BackgroundTracker
from services.learner.metrics.config import Backend, TrackingConfig
from services.learner.metrics.public import public
from services.learner.metrics.trackers import Trackers
from services.learner.ports import Tracker

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
        return importlib.import_module(f"services.learner.adapters.trackers_{vendor}")
    except ImportError as error:
        raise ConfigError(
            f"learner.tracking.backends: {vendor} is not installed ({error}); install the"
            f" `learner` extra, or leave {vendor!r} out"
        ) from error
