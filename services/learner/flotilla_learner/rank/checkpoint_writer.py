"""Writer of a rank's part of checkpoints, beside training."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from flotilla_learner.rank import checkpoint
from flotilla_learner.rank.checkpoint import CheckpointError
from flotilla_learner.rank.tensor_shards import (
    HostMemory,
    TensorGroups,
    flatten_groups,
    own_tensors,
)
from flotilla_learner.types import CheckpointFiles

T = TypeVar("T")


class CheckpointWriter:
    """Writes one checkpoint at a time, in a thread, from a copy in host memory.

    Ranks do not wait for each other: each writes only its own parts."""

    def __init__(
        self,
        rank: int,
        device: torch.device,
        describe: Callable[[Path], Sequence[str]],
        record: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """Create it. `describe` writes files into a folder and names them: on the first rank, after
        the tensors. `record` goes into its record beside the step."""
        self._rank = rank
        self._describe = describe
        self._record = record
        self._memory = HostMemory(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[CheckpointFiles] | None = None

    @torch.no_grad()
    def begin_writing(self, directory: Path, groups: TensorGroups, step: int) -> None:
        """Copy this rank's parts of the state as of `step`, which may change once this returns, and
        start writing them.

        Raises CheckpointError while an earlier copy is not written yet."""
        if self._written is not None and not self._written.done():
            raise CheckpointError("the previous checkpoint is still being written: wait for it")
        tensors = flatten_groups(groups)
        copied = self._memory.copy_tensors(own_tensors(tensors, self._rank))
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._written = self._thread.submit(self._write_files, directory, copied, shapes, step)

    def when_written(self, use: Callable[[CheckpointFiles], T]) -> Future[T]:
        """Return the result of `use` on the newest checkpoint's files, once they are fsynced."""
        written = self._written
        if written is None:
            raise CheckpointError("no checkpoint was begun")
        return self._thread.submit(lambda: use(written.result()))

    def _write_files(
        self,
        directory: Path,
        tensors: dict[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        step: int,
    ) -> CheckpointFiles:
        files = checkpoint.write_rank_files(directory, tensors, self._rank)
        if self._rank > 0:
            return files
        run = checkpoint.write_run_files(
            directory, self._describe, shapes, **self._record, step=step
        )
        return CheckpointFiles(directory, {**files.sha256, **run.sha256})
