"""Device buffers that other processes of the machine map: over CUDA IPC on a GPU, as a file in
memory on a CPU.

A handle comes from another process, so it is JSON that is checked before anything is opened."""

import mmap
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from flotilla_common.process.host_identity import host_digest

_FILE_NAME = "flotilla-weights"
# Counters in one of torch's files; torch writes at any offset without a check.
_COUNTERS = 10_000

_Size = Annotated[int, Field(ge=0, lt=2**48)]


class _Handle(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, ser_json_bytes="base64", val_json_bytes="base64"
    )

    size: _Size


class HostHandle(_Handle):
    """A file in memory, through the process that holds it open."""

    kind: Literal["host"] = "host"
    pid: Annotated[int, Field(gt=0, lt=2**31)]
    descriptor: Annotated[int, Field(ge=0, lt=2**31)]


class CudaHandle(_Handle):
    """Memory of a GPU, as torch shares its storages."""

    kind: Literal["cuda"] = "cuda"
    memory: Annotated[bytes, Field(min_length=64, max_length=4096)]
    offset: _Size
    # The file in shared memory in which torch counts the users of the storage.
    counter: Annotated[str, Field(pattern=r"^/torch_[0-9_]{1,64}$")]
    counter_offset: Annotated[int, Field(ge=0, lt=_COUNTERS)]
    event: Annotated[bytes, Field(min_length=64, max_length=64)]
    has_event: bool


class BufferOffer(BaseModel):
    """Buffers offered to one process; none, and the reason, if there is no common device."""

    model_config = _Handle.model_config

    handles: Annotated[
        list[Annotated[HostHandle | CudaHandle, Field(discriminator="kind")]],
        Field(max_length=16),
    ] = []
    # Where both sides signal filled and read buffers, once the buffers are open.
    meeting: Annotated[str, Field(pattern=r"^[a-z0-9-]{0,100}$")] = ""
    refusal: Annotated[str, Field(max_length=1000)] = ""


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """A uint8 buffer of this process, and the handle by which others open it."""

    data: Tensor
    handle: HostHandle | CudaHandle


def identify_device(device: torch.device) -> str:
    """Return a name of a device that is the same in every process of the machine."""
    if device.type == "cuda":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return f"host-{host_digest().hex()}"


def find_devices() -> dict[str, torch.device]:
    """Return the devices of this process, including host memory, by identity."""
    there = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return {identify_device(device): device for device in (*there, torch.device("cpu"))}


class BufferPool:
    """Buffers of one size on some devices, lent to one user after another.

    They are kept for the life of the process: torch never frees GPU memory that a killed process
    had opened."""

    def __init__(self, devices: Mapping[str, torch.device], size: int) -> None:
        self._devices = devices
        self._size = size
        self._free: dict[str, list[SharedBuffer]] = {identity: [] for identity in devices}
        self._turn = threading.Lock()

    def take_buffer(self, identity: str) -> SharedBuffer:
        """Return a buffer on a device, with undefined content. Raises RuntimeError."""
        with self._turn:
            if identity not in self._devices:
                known = ", ".join(self._devices) or "none"
                raise RuntimeError(
                    f"the engine's device {identity} is none of the sender's ({known}); weights go"
                    " by ipc to engines on the same device alone"
                )
            free = self._free[identity]
            return free.pop() if free else _make_buffer(self._size, self._devices[identity])

    def give_back(self, identity: str, buffer: SharedBuffer) -> None:
        """Return a buffer to the pool."""
        with self._turn:
            self._free[identity].append(buffer)


def read_offer(text: str | bytes, size: int, device: torch.device) -> tuple[list[Tensor], str]:
    """Open the buffers of `size` bytes that another process offers to this one, on `device`.

    Return them and the name of that process's meeting. Raises RuntimeError if the offer has no
    buffers or other ones."""
    try:
        offer = BufferOffer.model_validate_json(text)
        if offer.refusal:
            raise RuntimeError(offer.refusal)
        if wrong := [each.size for each in offer.handles if each.size != size]:
            raise RuntimeError(f"the offered buffers have {wrong} bytes, not {size}")
        return [_open_buffer(handle, device) for handle in offer.handles], offer.meeting
    except (ValidationError, OSError) as error:
        raise RuntimeError(f"cannot open the offered buffers: {error}") from error


def finish_copies(device: torch.device) -> None:
    """Wait for all copies to and from a device that this thread has started."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _make_buffer(size: int, device: torch.device) -> SharedBuffer:
    return _make_on_gpu(size, device) if device.type == "cuda" else _make_in_memory(size)


def _open_buffer(handle: HostHandle | CudaHandle, device: torch.device) -> Tensor:
    kind = "cuda" if isinstance(handle, CudaHandle) else "cpu"
    if kind != device.type:
        raise RuntimeError(f"the offered buffer is on {kind}, but this process uses {device}")
    return (
        _open_on_gpu(handle, device) if isinstance(handle, CudaHandle) else _open_in_memory(handle)
    )


def _make_in_memory(size: int) -> SharedBuffer:
    # The file has no name in any folder, so a killed process leaves nothing behind.
    descriptor = os.memfd_create(_FILE_NAME)
    os.truncate(descriptor, size)
    data = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    return SharedBuffer(data, HostHandle(size=size, pid=os.getpid(), descriptor=descriptor))


def _open_in_memory(handle: HostHandle) -> Tensor:
    path = Path(f"/proc/{handle.pid}/fd/{handle.descriptor}")
    if not str(path.readlink()).startswith(f"/memfd:{_FILE_NAME}"):
        raise RuntimeError(f"{path} is not a buffer")
    descriptor = os.open(path, os.O_RDWR)
    try:
        if os.fstat(descriptor).st_size != handle.size:
            raise RuntimeError(f"{path} does not have {handle.size} bytes")
        return torch.frombuffer(mmap.mmap(descriptor, handle.size), dtype=torch.uint8)
    finally:
        os.close(descriptor)


def _make_on_gpu(size: int, device: torch.device) -> SharedBuffer:
    data = torch.empty(size, dtype=torch.uint8, device=device)
    shared: Any = data.untyped_storage()._share_cuda_()  # pyright: ignore[reportPrivateUsage]
    _, memory, held, offset, counter, counter_offset, event, has_event = shared
    handle = CudaHandle(
        size=held,
        memory=memory,
        offset=offset,
        counter=counter.decode(),
        counter_offset=counter_offset,
        event=event,
        has_event=has_event,
    )
    return SharedBuffer(data, handle)


def _open_on_gpu(handle: CudaHandle, device: torch.device) -> Tensor:
    # Also of the context that torch creates when it first uses a GPU.
    opened = torch.empty(0, dtype=torch.uint8, device=device)
    new_shared: Any = torch.UntypedStorage._new_shared_cuda  # pyright: ignore[reportPrivateUsage]
    storage = new_shared(
        opened.device.index,
        handle.memory,
        handle.size,
        handle.offset,
        handle.counter.encode(),
        handle.counter_offset,
        handle.event,
        handle.has_event,
    )
    return opened.set_(storage)
