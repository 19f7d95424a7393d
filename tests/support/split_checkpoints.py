"""Checkpoints as several ranks write them, made of one rank's."""

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from flotilla_learner.rank.tensor_shards import shard_pattern


def split_checkpoint(source: Path, target: Path, ranks: int) -> Path:
    """Copy the checkpoint of one rank as that of several: each has some rows of a tensor, the first
    has what has no rows."""
    shutil.copytree(source, target)
    for path in target.glob(shard_pattern(0)):
        _split_file(path, ranks)
    return target


def _split_file(path: Path, ranks: int) -> None:
    whole = load_file(path)
    for rank in range(ranks):
        parts, places = dict[str, Tensor](), dict[str, object]()
        for name, tensor in whole.items():
            first, part = _part_of(tensor, rank, ranks)
            if part.numel():
                parts[name] = part.clone()
                places[name] = {"saved_offsets": [first, *[0] * tensor.ndim][: tensor.ndim]}
        metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(places)}
        name = path.name.replace("shard-00001-", f"shard-{rank + 1:05d}-")
        save_file(parts, path.with_name(name), metadata)


def _part_of(tensor: Tensor, rank: int, ranks: int) -> tuple[int, Tensor]:
    """Return where a rank's part begins, and the part."""
    if not tensor.ndim:
        return 0, tensor if rank == 0 else tensor.new_empty(0)
    rows = -(-tensor.shape[0] // ranks)
    return rank * rows, tensor[rank * rows : (rank + 1) * rows]
