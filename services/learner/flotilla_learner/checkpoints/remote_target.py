"""Destination of a run's uploads."""

from dataclasses import dataclass
from pathlib import Path

from flotilla_common.process.runtime import Runtime
from flotilla_common.spec.config import canonical_json
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.ports import RemoteStore


@dataclass(frozen=True, slots=True)
class RemoteTarget:
    """Destination of uploads: the store, the run's files, and how many checkpoints to keep."""

    store: RemoteStore
    run_dir: Path
    # Canonical JSON of the run's spec.
    spec: str
    keep: int


def remote_target_of(
    store: RemoteStore | None, runtime: Runtime[LearnerConfig]
) -> RemoteTarget | None:
    """Return the upload destination of a run's checkpoints, if it has one; an evaluation makes
    none."""
    if store is None or runtime.config.mode != "train":
        return None
    spec = canonical_json(runtime.spec)
    return RemoteTarget(store, runtime.run_dir, spec, runtime.config.checkpoint.remote_keep)
