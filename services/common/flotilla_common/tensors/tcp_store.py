"""Rendezvous stores of torch, each bound to a single address."""

import socket
from datetime import timedelta

from torch import distributed as dist

from flotilla_common.weights.network_interfaces import choose_interface

# torch documents these as part of `torch.distributed` but does not export them there.
TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
PrefixStore = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]


def host_tcp_store(host: str, port: int, patience: timedelta) -> TCPStore:
    """Open a store at a port of `host`, 0 for a free one; its waits end after `patience`.

    Raises OSError."""
    choose_interface(host)
    # Bound here, because the store itself would listen on every network of the machine.
    listener = socket.create_server((host, port))
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=patience,
        master_listen_fd=listener.detach(),
    )


def join_tcp_store(host: str, port: int, patience: timedelta) -> TCPStore:
    """Return the store that another process has opened. Raises RuntimeError, as torch does."""
    choose_interface(host)
    return TCPStore(host, port, is_master=False, timeout=patience)
