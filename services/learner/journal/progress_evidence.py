"""How far a run has come, as its other files say: what a journal and its mark, both old, hide."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import ConfigError
from services.learner.checkpoints.manifest import (
    MANIFEST,
    DamagedCheckpointError,
    Manifest,
    verify,
)
from services.learner.tracking.metric_lines import points

CHECKPOINTS, METRICS = "checkpoints", "metrics.jsonl"
_RECEIVED = "throughput/trajectories"
# The end of a metrics file; a line has a few KiB.
_TAIL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Trace:
    """That a run has come to a step, by one of its files."""

    step: int
    path: Path
    # Tries that it had acknowledged, at the least.
    acknowledged: int = 0


@dataclass(frozen=True, slots=True)
class Orphan:
    """A whole checkpoint that the journal does not know."""

    folder: Path
    manifest: Manifest


def newest_trace(run_dir: Path, step: int) -> Trace | None:
    """The newest trace of a step after `step`; None where the journal knows all."""
    orphans = [Trace(o.manifest.step, o.folder / MANIFEST) for o in orphans_after(run_dir, step)]
    logged = [trace for trace in _logged(run_dir / METRICS) if trace.step > step]
    return max([*logged, *orphans], key=lambda trace: trace.step, default=None)


def orphans_after(run_dir: Path, step: int) -> list[Orphan]:
    """The whole checkpoints of later steps, oldest first. Reads every byte of them."""
    folders = sorted((run_dir / CHECKPOINTS).glob("step-*"))
    later = (folder for folder in folders if (step_of(folder) or 0) > step)
    return [Orphan(folder, manifest) for folder in later if (manifest := whole(folder))]


def step_of(folder: Path) -> int | None:
    """The step of a checkpoint's folder, by its name; None while it is being made."""
    digits = folder.name.removeprefix("step-")
    return int(digits) if digits.isdecimal() else None


def whole(folder: Path) -> Manifest | None:
    """The manifest of a checkpoint that is what was written, and is where it belongs."""
    try:
        manifest = verify(folder)
    except (DamagedCheckpointError, ConfigError):
        return None
    return manifest if manifest.step == step_of(folder) else None


def _logged(path: Path) -> Iterator[Trace]:
    """The steps that were logged. One that does not follow on the one before it is no trace: a
    damaged digit must not stop a run."""
    before = 0
    for point in points(_tail(path)):
        step = point["step"]
        if before <= step <= before + 1:
            yield Trace(step, path, _count(point.get(_RECEIVED)))
        before = step


def _tail(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return []
    return lines[1:-1] if size > _TAIL_BYTES else lines[:-1]


def _count(value: Any) -> int:
    return int(value) if isinstance(value, int | float) else 0
