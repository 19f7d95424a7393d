"""Tensors of all ranks in one folder, in the format of torch.distributed.checkpoint (DCP).

Each rank writes its own parts to separate safetensors files, whose headers give the parts' places
in the tensors; any number of ranks can then read their parts. Planner, writer and reader are DCP's.
Its collectives, which send pickles, and its `.metadata`, which is one, are not used: ranks need not
wait for each other, and the headers hold the same information."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
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

from flotilla_learner.rank.sharding import local_tensor
from flotilla_learner.run_files.rank_record import RankRecordError, read_shapes

# While DCP writes a file, it holds a second copy of its content.
_FILE_BYTES = 1 << 30
# Most bytes of files mapped at once: they count as this process's memory until closed.
_MAPPED_BYTES = 64 << 20


# Tensors by name, by their group.
TensorGroups = Mapping[str, Mapping[str, Tensor]]


class TensorShardError(Exception):
    """A folder does not hold the requested tensors; the message names them."""


class HostMemory:
    """Copies of a rank's tensors in host memory."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        # Pinned memory is slow to allocate, so it is kept; a CPU rank leaves memory to its model.
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
    """Return the tensors of all groups as `GROUP/NAME`, their names in files."""
    return {
        f"{group}/{name}": tensor.detach()
        for group, tensors in groups.items()
        for name, tensor in tensors.items()
    }


def own_tensors(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return the tensors of which this rank writes a part; the first rank writes unsplit ones."""
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
    """Return the name pattern of a rank's files."""
    return f"shard-{rank + 1:05d}-*.safetensors"


def write_parts(folder: Path, tensors: Mapping[str, Tensor], rank: int) -> None:
    """Write and fsync this rank's parts of tensors in host memory, to its own files."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=True)
    files = _assign_files(tensors)
    writer = HuggingFaceStorageWriter(str(folder), files, save_distributed=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    # The writer names the files of the k-th plan after the k-th rank.
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
    """Yield parts of a plan, each to be read with the files opened again."""
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
    """Tensors in a folder."""

    def __init__(self, folder: Path) -> None:
        """Read the headers of its files. Raises TensorShardError."""
        self._folder = folder
        self._reader = HuggingFaceStorageReader(str(folder))
        try:
            self._metadata = self._reader.read_metadata()
        except (OSError, SafetensorError) as error:
            raise TensorShardError(f"{folder}: {error}") from error

    def list_group(self, group: str) -> list[str]:
        """Return the names of a group's tensors.

        Raises TensorShardError if one is missing or incomplete."""
        shapes = self._read_shapes(group)
        self._check_complete(group, shapes, shapes)
        return list(shapes)

    @torch.no_grad()
    def read_group(self, group: str, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors, of which this rank may hold only parts, from a group.

        Raises TensorShardError if one is missing, incomplete or of another shape."""
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
    ) -> None:
        """Check that all parts of tensors exist: DCP would leave a missing part as it is."""
        for name in names:
            saved = self._metadata.state_dict_metadata.get(f"{group}/{name}")
            if name not in shapes or not isinstance(saved, TensorStorageMetadata):
                raise TensorShardError(f"{self._folder} has no {group}/{name}")
            if sum(math.prod(part.sizes) for part in saved.chunks) != math.prod(shapes[name]):
                raise TensorShardError(f"{self._folder} lacks parts of {group}/{name}")
