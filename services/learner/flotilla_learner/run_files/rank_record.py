"""Record of a checkpoint, `rank.json`, written by the first rank.

    {"step": 40, "shapes": {"model/model.norm.weight": [64], ...}}

`shapes` covers all tensors of all ranks: each rank's file lists its own tensors, but not those
of other files. With the record, every reader notices when a rank's part is missing."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flotilla_common.files.json_files import read_json_object

RECORD_FILE = "rank.json"


class RankRecordError(ValueError):
    """A record is missing or malformed; the message names the file."""


def write_record(folder: Path, shapes: Mapping[str, Sequence[int]], **facts: object) -> None:
    """Write the record, with further facts beside the shapes."""
    record = {**facts, "shapes": {name: list(shape) for name, shape in shapes.items()}}
    (folder / RECORD_FILE).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def read_record(folder: Path) -> Mapping[str, Any]:
    """Return the record of a checkpoint. Raises RankRecordError."""
    try:
        return read_json_object(folder / RECORD_FILE)
    except ValueError as error:
        raise RankRecordError(str(error)) from error


def read_shapes(folder: Path, group: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the whole tensors `group/NAME` by `NAME`. Raises RankRecordError."""
    try:
        shapes = {name: tuple(shape) for name, shape in read_record(folder)["shapes"].items()}
    except (KeyError, AttributeError, TypeError) as error:
        problem = f"{folder / RECORD_FILE} has no tensor shapes: {error!r}"
        raise RankRecordError(problem) from error
    prefix = f"{group}/"
    return {n.removeprefix(prefix): shape for n, shape in shapes.items() if n.startswith(prefix)}
