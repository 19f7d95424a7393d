"""Publication of weights as one safetensors file in a rotation of shared-memory slots."""

import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flotilla_common.weights.fingerprint import TensorEntry, compute_fingerprint
from flotilla_learner.checkpoints.tensor_files import encode_header
from flotilla_learner.rank.shard_checksums import ShardChecksums
from flotilla_learner.rank.sharding import bring_near, gather_tensor
from flotilla_learner.ranks.protocol import SLOT_COUNT, slot_paths

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}
_ALIGNMENT = 64
# Never through a link, and never a file that another process has made.
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

# Maps (name, parameter) to the tensor that is published under this name.
Merge = Callable[[str, Tensor], Tensor]


class SharedMemoryError(Exception):
    """The publications do not fit into shared memory; the message gives the required size."""


@dataclass(frozen=True, slots=True)
class _TensorSpan:
    name: str
    shape: tuple[int, ...]
    start: int
    end: int


def _as_it_is(_: str, parameter: Tensor) -> Tensor:
    return parameter


class WeightSlots:
    """Weights in `{name}-slot{k}.safetensors`, version v in slot v mod 3.

    The newest two versions stay readable while the third slot is written. The files are made and
    touched once, so that a publication causes no page faults. A reader that is overtaken sees
    bytes that do not match the checksums it was given.

    If parameters are split over ranks, all of them have slots of the same name, all write each
    version, and `own` marks the rank whose slots are the files."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        dtype: torch.dtype,
        folder: Path,
        name: str,
        *,
        own: bool = True,
        merge: Merge = _as_it_is,
        marks: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Make the slots; `merge` returns what is published for each parameter, in its own shape.

        `marks` are not weights, but published beside them, so that the fingerprint covers them."""
        self._marks = marks or {}
        self._parameters = {**parameters, **self._marks}
        self._merge = merge
        self._dtype = dtype
        header, self._places, self.total_bytes = _plan_file(self._parameters, dtype)
        self.paths = slot_paths(folder, name)
        self._own = own
        self._buffers: list[Tensor] = []
        if own:
            self._buffers = [_create_slot(path, header, self.total_bytes) for path in self.paths]
        self._inodes = [path.stat().st_ino for path in self.paths] if own else []
        # Version in each slot that has been written.
        self._written: dict[int, int] = {}

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions whose weights are still here, oldest first."""
        return tuple(sorted(self._written.values()))

    def iter_tensors(self, version: int) -> Iterator[tuple[str, Tensor]]:
        """Yield views of a version's weights by name, in the dtype of their publication.

        Raises KeyError if the version is no longer in a slot."""
        slot = version % SLOT_COUNT
        if self._written.get(slot) != version:
            raise KeyError(version)
        for place in self._places:
            if place.name in self._marks:
                continue
            raw = self._buffers[slot][place.start : place.end]
            yield place.name, raw.view(self._dtype).view(place.shape)

    @torch.no_grad()
    def write_version(self, version: int) -> tuple[Path, bytes, tuple[TensorEntry, ...]]:
        """Write the current weights; return path, fingerprint and manifest."""
        slot = version % SLOT_COUNT
        buffer = self._buffers[slot]
        self._written.pop(slot, None)
        checksums = ShardChecksums()
        for place in self._places:
            # Cast and checksum where the parameters are; only the result is moved.
            whole = _gather_as(self._published_tensor(place.name), self._dtype, checksums)
            buffer[place.start : place.end].copy_(whole.reshape(-1).view(torch.uint8))
        entries = _make_manifest(self._places, self._dtype, checksums)
        self._written[slot] = version
        return self.paths[slot], compute_fingerprint(entries, self.total_bytes), entries

    @torch.no_grad()
    def join_version(self, version: int) -> None:
        """Take part in the first rank's `write_version`; the version can then be read here."""
        slot = version % SLOT_COUNT
        self._written.pop(slot, None)
        checksums = ShardChecksums()
        for place in self._places:
            _gather_as(self._published_tensor(place.name), self._dtype, checksums)
        checksums.sum_parts()
        self._buffers = self._buffers or [_map_slot(path, self.total_bytes) for path in self.paths]
        self._written[slot] = version

    def _published_tensor(self, name: str) -> Tensor:
        return self._merge(name, self._parameters[name])

    def unlink_slots(self) -> None:
        """Unlink the slots, but not those that a successor made in their place.

        Readers that have them open keep what they read."""
        for path, inode in zip(self.paths, self._inodes, strict=self._own):
            if path.exists() and path.stat().st_ino == inode:
                path.unlink(missing_ok=True)


@torch.no_grad()
def fingerprint_weights(parameters: Mapping[str, Tensor], dtype: torch.dtype) -> bytes:
    """Return the fingerprint that `WeightSlots` would give these weights, without writing them."""
    _, places, total_bytes = _plan_file(parameters, dtype)
    checksums = ShardChecksums()
    for place in places:
        _gather_as(parameters[place.name], dtype, checksums)
    return compute_fingerprint(_make_manifest(places, dtype, checksums), total_bytes)


def _gather_as(tensor: Tensor, dtype: torch.dtype, checksums: ShardChecksums) -> Tensor:
    """Return the whole tensor as it is published, and add it to the checksums."""
    # Cast first: half of the bytes between the ranks.
    near = bring_near(tensor.to(dtype))
    whole = gather_tensor(near)
    checksums.add_tensor(near, whole)
    return whole


def _make_manifest(
    places: Sequence[_TensorSpan], dtype: torch.dtype, checksums: ShardChecksums
) -> tuple[TensorEntry, ...]:
    return tuple(
        TensorEntry(place.name, _DTYPE_NAMES[dtype], place.shape, place.start, checksum)
        for place, checksum in zip(places, checksums.sum_parts(), strict=True)
    )


def _plan_file(
    parameters: Mapping[str, Tensor], dtype: torch.dtype
) -> tuple[bytes, tuple[_TensorSpan, ...], int]:
    """Return the safetensors header, each tensor's span in the file, and the file's length."""
    named = ((name, _SAFETENSORS_NAMES[dtype], t.shape) for name, t in parameters.items())
    header = encode_header(named, _ALIGNMENT)
    places: list[_TensorSpan] = []
    at = len(header)
    for name, tensor in parameters.items():
        end = at + tensor.numel() * dtype.itemsize
        places.append(_TensorSpan(name, tuple(tensor.shape), at, end))
        at = end
    return header, tuple(places), at


def _map_slot(path: Path, size: int) -> Tensor:
    """Map a slot that the first rank has created."""
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


def _create_slot(path: Path, header: bytes, size: int) -> Tensor:
    """Map a new file of `size` bytes with every page present.

    Raises SharedMemoryError if there is no room: without the allocation, the first touch of an
    unavailable page would kill the process."""
    # Never the file of a predecessor, which a reader may have mapped.
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, _NEW, 0o600), "r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            path.unlink()
            raise SharedMemoryError(
                f"{path.parent} has no room for {SLOT_COUNT} publications of {size:,} bytes "
                f"({error.strerror}): enlarge it (docker: --shm-size)"
            ) from error
        mapped = mmap.mmap(file.fileno(), size)
    buffer = torch.frombuffer(mapped, dtype=torch.uint8)
    buffer.zero_()
    mapped[: len(header)] = header
    return buffer
