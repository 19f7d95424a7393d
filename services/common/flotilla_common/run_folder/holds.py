"""Holds, which keep the payloads of groups in a run's journal from being pruned.

A process that reads payloads, such as an open page, writes `holds/NAME.json` into the run's folder,
{"steps": [first, last] or null, "groups": [...], "until": unix seconds}, and renews it before
`until`. After that a hold is ignored."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flotilla_common.files.durable_files import replace_file
from flotilla_common.spec.number_ranges import MOST_STEPS

FOLDER = "holds"
# Most groups kept by one hold, and by all dumps together; the newest ones.
MOST_GROUPS = 200


@dataclass(frozen=True, slots=True)
class Hold:
    """Groups that a reader needs: those of steps `steps[0]` to `steps[1]`, and named ones."""

    until: float
    steps: tuple[int, int] | None = None
    groups: tuple[str, ...] = ()


def write_hold(run_dir: Path, name: str, hold: Hold) -> None:
    """Write or renew a hold. Raises OSError."""
    path = _hold_path(run_dir, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps(asdict(hold)).encode())


def release_hold(run_dir: Path, name: str) -> None:
    """Remove a hold, if it exists."""
    _hold_path(run_dir, name).unlink(missing_ok=True)


def parse_hold(data: bytes) -> Hold:
    """Parse the content of a hold's file. Raises ValueError, KeyError, TypeError."""
    values: Any = json.loads(data)
    steps, groups = values["steps"], values["groups"]
    pair = (_to_step(steps[0]), _to_step(steps[1])) if steps is not None else None
    return Hold(float(values["until"]), pair, tuple(map(str, groups)))


def _hold_path(run_dir: Path, name: str) -> Path:
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"hold {name!r}: expected letters, digits, - and _")
    return run_dir / FOLDER / f"{name}.json"


def _to_step(value: Any) -> int:
    """Return a step within the range of SQLite's integers."""
    return min(max(int(value), 0), MOST_STEPS)
