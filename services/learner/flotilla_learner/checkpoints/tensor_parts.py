"""Tensors of a model, or of a checkpoint whose parts are in the files of several ranks, found by
their headers.

The ranks write them with torch.distributed.checkpoint (see `rank/tensor_shards.py`), and split them
only between rows. Nothing is loaded here, and no torch is needed."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_learner.checkpoints.tensor_files import (
    TensorFileError,
    TensorSpan,
    read_header,
    read_metadata,
)
from flotilla_learner.run_files.rank_record import read_shapes

MODEL, ADAPTERS = "model", "adapters"
# Keys in the metadata of a file's header: by tensor, the start of its part in each dimension.
_PLACES, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Rows of a tensor from `first_row` on, in a file."""

    path: Path
    span: TensorSpan
    first_row: int

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            file.seek(self.span.begin)
            return file.read(self.span.end - self.span.begin)


@dataclass(frozen=True, slots=True)
class SplitTensor:
    """A whole tensor: the concatenated data of its parts."""

    dtype: str
    shape: tuple[int, ...]
    parts: Sequence[TensorPart]

    def read(self) -> bytes:
        return b"".join(part.read() for part in self.parts)


def find_tensors(folder: Path, group: str) -> dict[str, SplitTensor]:
    """Return the tensors called `group/NAME` in a checkpoint, by `NAME`.

    Raises TensorFileError if parts of one are missing, or do not belong together, and
    RankRecordError if the record of the checkpoint does not list its tensors."""
    found: dict[str, list[TensorPart]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, part in _parts_of(path):
            if name.startswith(f"{group}/"):
                found.setdefault(name.removeprefix(f"{group}/"), []).append(part)
    if not found:
        raise TensorFileError(f"{folder} has no tensors of a {group}")
    joined = {name: _join_parts(folder, name, parts) for name, parts in found.items()}
    for name, shape in read_shapes(folder, group).items():
        if name not in joined or joined[name].shape != shape:
            raise TensorFileError(f"{folder} lacks parts of {group}/{name}")
    return joined


def find_model_tensors(folder: Path) -> dict[str, SplitTensor]:
    """Return the tensors of a model's folder. Raises TensorFileError if it has none."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise TensorFileError(f"{folder} has no *.safetensors")
    return {
        name: SplitTensor(span.dtype, span.shape, [TensorPart(path, span, 0)])
        for path in paths
        for name, span in read_header(path).items()
    }


def _parts_of(path: Path) -> Iterator[tuple[str, TensorPart]]:
    places = _read_places(path)
    for name, span in read_header(path).items():
        try:
            first, *others = [*places[name][_OFFSETS], *([0] if not span.shape else [])]
        except (KeyError, TypeError, ValueError) as error:
            raise TensorFileError(f"{path}: {name} has no valid offset: {error!r}") from error
        if any(others):
            raise TensorFileError(f"{path}: {name} is split within its rows")
        yield name, TensorPart(path, span, first)


def _read_places(path: Path) -> Mapping[str, Any]:
    try:
        places = json.loads(read_metadata(path)[_PLACES])
    except (KeyError, TypeError, ValueError) as error:
        raise TensorFileError(f"{path} is not a file of a checkpoint: {error!r}") from error
    if not isinstance(places, dict):
        raise TensorFileError(f"{path} is not a checkpoint's: {_PLACES} is not a JSON object")
    return places


def _join_parts(folder: Path, name: str, parts: Sequence[TensorPart]) -> SplitTensor:
    ordered = sorted(parts, key=lambda part: part.first_row)
    first = ordered[0].span
    rows = 0
    for part in ordered:
        alike = part.span.dtype == first.dtype and part.span.shape[1:] == first.shape[1:]
        if part.first_row != rows or not alike:
            raise TensorFileError(f"{folder}: {part.path.name} does not continue {name}")
        rows += part.span.shape[0] if part.span.shape else 1
    shape = (rows, *first.shape[1:]) if first.shape else ()
    return SplitTensor(first.dtype, shape, ordered)
