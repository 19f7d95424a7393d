"""Rendezvous of the ranks: a file on one machine, a port of the first rank's on several.

Like with `torchrun`, the first rank hosts a store, whose address the others receive. Ranks of
several machines try their connections before torch does: gloo and NCCL wait up to an hour for one
that cannot be made, and then name no rank."""

import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from torch import distributed as dist

from flotilla_common.tensors.tcp_store import host_tcp_store, join_tcp_store
from flotilla_common.weights.network_interfaces import choose_interface, suggest_network_fix

# Documented as part of `torch.distributed`, but not declared there.
Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]
FileStore = dist.FileStore  # pyright: ignore[reportPrivateImportUsage]

FILE, TCP = "file://", "tcp://"
# Time for all ranks to come to the store.
_PATIENCE = timedelta(minutes=5)
# A firewall that drops never answers; a machine of the same network answers in milliseconds.
_CONNECT_S = 10.0


class MeetingError(RuntimeError):
    """Ranks are missing or cannot reach each other; the message names them, and the fix."""


def host_store(host: str) -> tuple[Store, str]:
    """Open a store at a free port of `host`; return it and the address for ranks elsewhere."""
    store = host_tcp_store(host, 0, _PATIENCE)
    return store, f"{TCP}{host}:{store.port}"


def connect_store(rendezvous: str, count: int) -> Store:
    """Return the store of the `count` ranks that meet at `rendezvous`. Raises MeetingError."""
    if rendezvous.startswith(FILE):
        return FileStore(rendezvous.removeprefix(FILE), count)
    address = rendezvous.removeprefix(TCP)
    if why := _try_connection(address):
        fix = suggest_network_fix()
        raise MeetingError(f"this machine cannot reach rank 0 at {address} ({why}): {fix}")
    host, _, port = address.rpartition(":")
    return join_tcp_store(host, int(port), _PATIENCE)


def meet_ranks(store: Store, rendezvous: str, index: int, count: int) -> None:
    """Wait for all ranks, and have each try a connection to every other one.

    Raises MeetingError on all ranks if any connection fails."""
    meeting = rendezvous.removeprefix(TCP)
    own = choose_interface(meeting.rpartition(":")[0])

    def exchange(what: str, text: str) -> Sequence[str]:
        """Give all ranks a text; return theirs, in order."""
        store.set(f"{what}/{index}", text)
        keys = [f"{what}/{rank}" for rank in range(count)]
        try:
            return [value.decode() for value in store.multi_get(keys)]
        except dist.DistStoreError as error:
            missing = ", ".join(str(rank) for rank in range(count) if not store.check([keys[rank]]))
            raise MeetingError(
                f"rank {missing} of {count} has not come to {meeting} in"
                f" {_PATIENCE.total_seconds():g} s: its log shows what it waits for"
            ) from error

    # The kernel accepts connections. The door stays open until all ranks have tried it.
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    with socket.create_server((own, 0), family=family, backlog=count) as door:
        addresses = exchange("door", f"{own}:{door.getsockname()[1]}")
        with ThreadPoolExecutor(count) as pool:
            failures = list(pool.map(_try_connection, addresses))
        wrong = [
            f"rank {index} at {own} cannot reach rank {rank} at {address} ({why})"
            for rank, (address, why) in enumerate(zip(addresses, failures, strict=True))
            if why
        ]
        found = [text for text in exchange("tried", "; ".join(wrong)) if text]
    if found:
        raise MeetingError(f"{'; '.join(found)}: {suggest_network_fix()}")


def _try_connection(address: str) -> str:
    """Try to connect to host:port; return the failure, or ""."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except TimeoutError:
        return f"nothing comes back in {_CONNECT_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    return ""
