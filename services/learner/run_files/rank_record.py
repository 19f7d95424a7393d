"""Record of a checkpoint, `rank.json`, as the first rank writes it.

    {"step": 40, "shapes": {"model/model.norm.weight": [64], ...}}

`shapes` are those of all tensors of all ranks: the files of each rank say what lies in them, and
not what another file should hold. So every reader knows when the part of some rank is missing."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.common.json_files import read_json_object

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
        problem = f"{folder / RECORD_FILE} says no shapes of tensors: {error!r}"
        raise RankRecordError(problem) from error
    prefix = f"{group}/"
    return {n.removeprefix(prefix): shape for n, shape in shapes.items() if n.startswith(prefix)}
