"""Groups of one sender and the workers of one engine; these are over gloo or NCCL."""

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from services.common.network_interfaces import own_address
from services.common.tensors.tcp_store import PrefixStore

SENDER = 0
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_making = threading.Lock()


class TransferGroup(Protocol):
    """A group in which one process sends and all others receive.

    A process may be in several. All that is waited for ends, and raises RuntimeError, within the
    group's timeout."""

    def begin_broadcast(self, tensor: Tensor) -> Callable[[], object]:
        """Begin to send `tensor`, or to fill it with what is sent, after all that has begun before.

        Return what waits until that is done here. Raises RuntimeError."""
        ...

    def abort(self) -> None:
        """Give the group up, whatever the others do."""
        ...


class CollectiveGroup:
    """A process group whose rank 0 sends. Implements `TransferGroup`.

    Not torch's default group, of which a process has one."""

    def __init__(
        self, store: Any, host: str, name: str, rank: int, size: int, backend: str, timeout_s: float
    ) -> None:
        """Meet the others at `store`, reaching them in the network of `host`.

        Every wait of the group ends after `timeout_s`. Raises RuntimeError, as all methods do."""
        timeout = timedelta(seconds=timeout_s)
        place = PrefixStore(name, store)
        self._group = (
            _gloo_group(place, host, rank, size, timeout)
            if backend == "gloo"
            else _nccl_group(place, rank, size, timeout)
        )
        self._timeout = timeout

    def begin_broadcast(self, tensor: Tensor) -> Callable[[], object]:
        """See `TransferGroup`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        options.timeout = self._timeout
        return partial(self._group.broadcast([tensor], options).wait, self._timeout)

    def abort(self) -> None:
        """See `TransferGroup`."""
        self._group.abort()


def _gloo_group(store: Any, host: str, rank: int, size: int, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=own_address(host))]
    options._timeout = timeout
    # One after another: the time of one that waits for its turn does not run.
    options._threads = 1
    return gloo(store, rank, size, options)


@contextmanager
def _without_watchdog() -> Generator[None]:
    """Have groups of NCCL that are made here leave failures to those who wait.

    torch's watchdog would end the whole process, and with the sender all its engines would lose a
    publication for the sake of one. It reads the variable when a group is made."""
    with _making:
        before = os.environ.get(_HANDLING)
        os.environ[_HANDLING] = "0"
        try:
            yield
        finally:
            del os.environ[_HANDLING]
            if before is not None:
                os.environ[_HANDLING] = before


def _nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    with _without_watchdog():
        group = nccl(store, rank, size, options)
    # Connected here and not at the first piece, when engines stand still.
    group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return group
