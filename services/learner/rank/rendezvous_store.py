"""Rendezvous of the ranks: a file on one machine, a port of the first rank's on several.

As for `torchrun`: the first rank hosts a store, whose address the others are told."""

import socket
from datetime import timedelta

from torch import distributed as dist

from services.common.network_interfaces import choose_interface

# What torch documents as part of `torch.distributed`, and does not declare there.
Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]
FileStore = dist.FileStore  # pyright: ignore[reportPrivateImportUsage]
TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]

FILE, TCP = "file://", "tcp://"
# A rank that was told of a store finds it within this.
_PATIENCE = timedelta(minutes=5)


def host_store(host: str) -> tuple[Store, str]:
    """Open a store at a free port of `host`; return it and the address for ranks elsewhere."""
    choose_interface(host)
    # Bound here, for the store's own server would listen on every network of the machine.
    listener = socket.create_server((host, 0))
    port: int = listener.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_PATIENCE,
        master_listen_fd=listener.detach(),
    )
    return store, f"{TCP}{host}:{port}"


def connect_store(rendezvous: str, count: int) -> Store:
    """Return the store of the `count` ranks that meet at `rendezvous`."""
    if rendezvous.startswith(FILE):
        return FileStore(rendezvous.removeprefix(FILE), count)
    host, _, port = rendezvous.removeprefix(TCP).rpartition(":")
    choose_interface(host)
    return TCPStore(host, int(port), is_master=False, timeout=_PATIENCE)
