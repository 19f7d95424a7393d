"""Rendezvous of the ranks: a file on one machine, a port of the first rank's on several.

Like with `torchrun`, the first rank hosts a store, whose address the others receive."""

from datetime import timedelta

from torch import distributed as dist

from services.common.tensors.tcp_store import host_tcp_store, join_tcp_store

# Documented as part of `torch.distributed`, but not declared there.
Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]
FileStore = dist.FileStore  # pyright: ignore[reportPrivateImportUsage]

FILE, TCP = "file://", "tcp://"
# Time for a rank to reach a store whose address it has.
_PATIENCE = timedelta(minutes=5)


def host_store(host: str) -> tuple[Store, str]:
    """Open a store at a free port of `host`; return it and the address for ranks elsewhere."""
    store = host_tcp_store(host, 0, _PATIENCE)
    return store, f"{TCP}{host}:{store.port}"


def connect_store(rendezvous: str, count: int) -> Store:
    """Return the store of the `count` ranks that meet at `rendezvous`."""
    if rendezvous.startswith(FILE):
        return FileStore(rendezvous.removeprefix(FILE), count)
    host, _, port = rendezvous.removeprefix(TCP).rpartition(":")
    return join_tcp_store(host, int(port), _PATIENCE)
