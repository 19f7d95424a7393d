"""Process groups of one sender and the workers of one engine, over gloo or NCCL."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from services.common.network_interfaces import own_address

# What torch documents as part of `torch.distributed`, and does not declare there.
PrefixStore = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]
SENDER = 0


class TransferGroup:
    """A group whose rank 0 sends. Not torch's default group: a process may be in several."""

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
        """Begin to send `tensor`, or to fill it with what is sent, after all that has begun before.

        Return what waits until that is done here."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = SENDER, 0
        options.timeout = self._timeout
        return partial(self._group.broadcast([tensor], options).wait, self._timeout)

    def broadcast(self, tensor: Tensor) -> None:
        """Send `tensor`, or fill it with what is sent. Returns when that is done here."""
        self.begin_broadcast(tensor)()

    def abort(self) -> None:
        """Give the group up, whatever the others do."""
        self._group.abort()


def _gloo_group(store: Any, host: str, rank: int, size: int, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=own_address(host))]
    options._timeout = timeout
    # One after another: the time of one that waits for its turn does not run.
    options._threads = 1
    return gloo(store, rank, size, options)


def _nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = timeout
    group = nccl(store, rank, size, options)
    # Connected here and not at the first piece, when engines stand still.
    group.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return group
