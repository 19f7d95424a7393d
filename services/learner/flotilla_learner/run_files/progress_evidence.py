"""Evidence of a run's progress in its other files, for when journal and mark are both old."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.run_folder.metric_lines import METRICS_FILE, parse_points, read_tail
from flotilla_learner.run_files.checkpoint_manifest import (
    MANIFEST,
    DamagedCheckpointError,
    Manifest,
    verify_checkpoint,
)

CHECKPOINTS = "checkpoints"
_RECEIVED = "throughput/trajectories"
# The end of a metrics file; a line has a few KiB.
_TAIL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ProgressTrace:
    """Evidence that a run reached a step, found in one of its files."""

    step: int
    path: Path
    # Tries that it had acknowledged, at least.
    acknowledged: int = 0


@dataclass(frozen=True, slots=True)
class OrphanCheckpoint:
    """An intact checkpoint that is missing from the journal."""

    folder: Path
    manifest: Manifest


def newest_trace(run_dir: Path, step: int) -> ProgressTrace | None:
    """Return the newest trace of a step after `step`; None if the journal is complete."""
    orphans = [
        ProgressTrace(o.manifest.step, o.folder / MANIFEST) for o in orphans_after(run_dir, step)
    ]
    logged = [trace for trace in _logged_traces(run_dir / METRICS_FILE) if trace.step > step]
    return max([*logged, *orphans], key=lambda trace: trace.step, default=None)


def orphans_after(run_dir: Path, step: int) -> list[OrphanCheckpoint]:
    """Return the intact checkpoints of later steps, oldest first. Reads every byte of them."""
    folders = sorted((run_dir / CHECKPOINTS).glob("step-*"))
    later = (folder for folder in folders if (step_of(folder) or 0) > step)
    return [
        OrphanCheckpoint(folder, manifest)
        for folder in later
        if (manifest := read_whole_manifest(folder))
    ]


def step_of(folder: Path) -> int | None:
    """Return the step in a checkpoint folder's name; None if it is not finished."""
    digits = folder.name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else None


def read_whole_manifest(folder: Path) -> Manifest | None:
    """Return the manifest of an intact checkpoint in the right folder, else None."""
    try:
        manifest = verify_checkpoint(folder)
    except (DamagedCheckpointError, ConfigError):
        return None
    return manifest if manifest.step == step_of(folder) else None


def _logged_traces(path: Path) -> Iterator[ProgressTrace]:
    """Yield a trace for each logged step. Ignore a step that does not follow its predecessor: a
    damaged digit must not stop a run."""
    before = 0
    for point in parse_points(read_tail(path, _TAIL_BYTES)):
        step = point["step"]
        if before <= step <= before + 1:
            yield ProgressTrace(step, path, _to_count(point.get(_RECEIVED)))
        before = step


def _to_count(value: Any) -> int:
    return int(value) if isinstance(value, int | float) else 0
