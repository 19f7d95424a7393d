"""Groups of one sender and the workers of one engine, over gloo or NCCL."""

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

from flotilla_common.tensors.tcp_store import PrefixStore
from flotilla_common.weights.network_interfaces import own_address

SENDER = 0
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_making = threading.Lock()


class TransferGroup(Protocol):
    """A group in which one process sends and all others receive.

    A process may be in several. Every wait ends within the group's timeout, and then raises
    RuntimeError."""

    def begin_broadcast(self, tensor: Tensor) -> Callable[[], object]:
        """Begin to send `tensor`, or to receive into it, after all broadcasts begun before.

        Return a callable that waits for its completion here. Raises RuntimeError."""
        ...

    def abort(self) -> None:
        """Abandon the group, whatever the others do."""
        ...


class CollectiveGroup:
    """A process group whose rank 0 sends. Implements `TransferGroup`.

    It is not torch's default group, which exists once per process."""

    def __init__(
        self, store: Any, host: str, name: str, rank: int, size: int, backend: str, timeout_s: float
    ) -> None:
        """Join the others through `store`, in the network of `host`.

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
    # One after another: the timeout of a queued broadcast does not run yet.
    options._threads = 1
    return gloo(store, rank, size, options)


@contextmanager
def _without_watchdog() -> Generator[None]:
    """Create NCCL groups in the block that report failures to their waiters only.

    torch's watchdog would end the whole sender, so that all its engines would lose a publication
    because of one. It reads the variable when a group is created."""
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
    # Connected here and not at the first piece, during which engines pause.
    group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return group
