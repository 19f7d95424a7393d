"""Tensors of all ranks in one folder, as torch.distributed.checkpoint (DCP) keeps them.

Each rank writes its own parts to safetensors files of its own, whose headers say where in the
tensors the parts lie; any number of ranks then reads its parts. Planner, writer and reader are
DCP's. What is left out of DCP are its collectives, which send pickles, and its `.metadata`, which
is one: ranks need not wait for each other, and the headers say the same."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor, Replicate

from services.learner.rank.sharding import local_tensor
from services.learner.run_files.rank_record import RankRecordError, read_shapes

# DCP holds all that goes to one file a second time while it writes it.
_FILE_BYTES = 1 << 30
# What is mapped of files at once: it counts as this process's memory until they are closed.
_MAPPED_BYTES = 64 << 20


# Tensors by name, by the group that they belong to.
TensorGroups = Mapping[str, Mapping[str, Tensor]]


class TensorShardError(Exception):
    """The tensors in a folder are not those that are asked for; the message says which."""


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A whole tensor as it was saved, in however many parts."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class HostMemory:
    """Copies of a rank's tensors in host memory."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        # Pinned memory takes long to get, and so is kept; what else a CPU rank has is its model's.
        self._stager = self._make_stager() if self._cuda else None

    def copy_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors, which may change afterwards. The copy is valid until the next one."""
        stager = self._stager or self._make_stager()
        copied: Any = stager.stage(dict(tensors))
        return copied

    def _make_stager(self) -> DefaultStager:
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=self._cuda,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=self._cuda,
            )
        )


def flatten_groups(groups: TensorGroups) -> dict[str, Tensor]:
    """Return the tensors of all groups as `GROUP/NAME`, as they are called in files."""
    return {
        f"{group}/{name}": tensor.detach()
        for group, tensors in groups.items()
        for name, tensor in tensors.items()
    }


def own_tensors(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return those of which this rank writes a part; the first rank writes what all have whole."""
    return {name: tensor for name, tensor in tensors.items() if _is_own(tensor, rank)}


def _is_own(tensor: Tensor, rank: int) -> bool:
    if not isinstance(tensor, DTensor):
        return rank == 0
    place = tensor.device_mesh.get_coordinate()
    if place is None or not local_tensor(tensor).numel():
        return False
    kinds = zip(place, tensor.placements, strict=True)
    return all(at == 0 for at, kind in kinds if isinstance(kind, Replicate))


def shard_pattern(rank: int) -> str:
    """Return the pattern of the names of a rank's files."""
    return f"shard-{rank + 1:05d}-*.safetensors"


def write_parts(folder: Path, tensors: Mapping[str, Tensor], rank: int) -> None:
    """Write and fsync this rank's parts of tensors in host memory, to files of its own."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    files = _assign_files(tensors)
    writer = HuggingFaceStorageWriter(str(folder), files, save_distributed=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    # The writer calls the files of the k-th plan those of the k-th rank.
    plan = writer.prepare_global_plan([SavePlan([])] * rank + [plan])[rank]
    writer.write_data(planner.finish_plan(plan), planner).wait()


def _assign_files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the number of each tensor's file, from 1 on."""
    assigned, number, held = dict[str, int](), 1, 0
    for name, tensor in tensors.items():
        size = local_tensor(tensor).nbytes
        if held and held + size > _FILE_BYTES:
            number, held = number + 1, 0
        assigned[name] = number
        held += size
    return assigned


def _split_plan(plan: LoadPlan) -> Iterator[LoadPlan]:
    """Yield parts of a plan, each to be read with the files opened anew."""
    items, size = list[ReadItem](), 0
    for item in plan.items:
        # Everything is float32.
        own = 4 * math.prod(item.lengths)
        if items and size + own > _MAPPED_BYTES:
            yield replace(plan, items=items)
            items, size = [], 0
        items.append(item)
        size += own
    yield replace(plan, items=items)


class ShardFolder:
    """The tensors in a folder."""

    def __init__(self, folder: Path) -> None:
        """Read the headers of its files. Raises TensorShardError."""
        self._folder = folder
        self._reader = HuggingFaceStorageReader(str(folder))
        try:
            self._metadata = self._reader.read_metadata()
        except (OSError, SafetensorError) as error:
            raise TensorShardError(f"{folder}: {error}") from error

    def list_group(self, group: str) -> dict[str, SavedTensor]:
        """Return the tensors of a group by name.

        Raises TensorShardError when one is missing or incomplete."""
        shapes = self._read_shapes(group)
        found = self._check_complete(group, shapes, shapes)
        return {n: SavedTensor(shapes[n], saved.properties.dtype) for n, saved in found.items()}

    @torch.no_grad()
    def read_group(self, group: str, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors, of which this rank may hold parts alone, with those of a group.

        Raises TensorShardError when one is missing, incomplete or of another shape."""
        self._check_complete(group, tensors, self._read_shapes(group))
        targets = flatten_groups({group: tensors})
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(targets, self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        try:
            plan = self._reader.prepare_local_plan(planner.create_local_plan())
            for part in _split_plan(planner.finish_plan(plan)):
                self._reader.read_data(part, planner).wait()
        except (OSError, ValueError, SafetensorError) as error:
            raise TensorShardError(f"{self._folder}: {error}") from error

    def _read_shapes(self, group: str) -> dict[str, tuple[int, ...]]:
        try:
            return read_shapes(self._folder, group)
        except RankRecordError as error:
            raise TensorShardError(str(error)) from error

    def _check_complete(
        self, group: str, names: Iterable[str], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, TensorStorageMetadata]:
        """Return what the headers say of tensors, all parts of which are there.

        DCP would leave what no file has as it is."""
        found: dict[str, TensorStorageMetadata] = {}
        for name in names:
            saved = self._metadata.state_dict_metadata.get(f"{group}/{name}")
            if name not in shapes or not isinstance(saved, TensorStorageMetadata):
                raise TensorShardError(f"{self._folder} has no {group}/{name}")
            if sum(math.prod(part.sizes) for part in saved.chunks) != math.prod(shapes[name]):
                raise TensorShardError(f"{self._folder} has not all parts of {group}/{name}")
            found[name] = saved
        return found
