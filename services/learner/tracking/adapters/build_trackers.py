"""Construction of a run's trackers from its spec. Only listed vendors are imported."""

import importlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
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

    Raises ConfigError for a missing package or an unwritable file."""

    def build_tracker(backend: Backend) -> Tracker:
        match backend:
            case "console":
                return ConsoleTracker()
            case "jsonl":
                tracker: Tracker = JsonlTracker(run_dir / METRICS_FILE)
            case "tensorboard":
                with _needed_package("tensorboard", "learner"):
                    module = _import_adapter("tensorboard")
                    tracker = module.TensorboardTracker(run_dir / "tensorboard")
            case "wandb":
                with _needed_package("wandb", "learner"):
                    module = _import_adapter("wandb")
                    tracker = module.WandbTracker(config, run_id, run_dir, redact_spec(spec))
            case "trackio":
                folder = run_dir / "trackio"
                with _needed_package("trackio", "trackio"):
                    module = _import_adapter("trackio")
                    tracker = module.TrackioTracker(config, run_id, folder, redact_spec(spec))
            case "mlflow":
                folder = run_dir / "mlflow"
                with _needed_package("mlflow", "mlflow"):
                    module = _import_adapter("mlflow")
                    tracker = module.MlflowTracker(config, run_id, folder, redact_spec(spec))
        return BackgroundTracker(tracker, backend)

    return CompositeTracker([build_tracker(backend) for backend in config.backends])


def _import_adapter(vendor: str) -> Any:
    return importlib.import_module(f"services.learner.tracking.adapters.{vendor}")


@contextmanager
def _needed_package(vendor: str, extra: str) -> Generator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"learner.tracking.backends: {vendor} is not installed ({error}); install it with"
            f" `pip install 'flotilla[{extra}]'`, or leave {vendor!r} out"
        ) from error
