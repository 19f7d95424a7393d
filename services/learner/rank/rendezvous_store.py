"""Rendezvous of the ranks: a file on one machine, a port of the first rank's on several.

As for `torchrun`: the first rank hosts a store, whose address the others are told."""

import fcntl
import ipaddress
import os
import socket
import struct
from datetime import timedelta
from typing import Any, cast

from torch import distributed as dist

# What torch documents as part of `torch.distributed`, and does not declare there.
Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]
FileStore = dist.FileStore  # pyright: ignore[reportPrivateImportUsage]
TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]

FILE, TCP = "file://", "tcp://"
# A rank that was told of a store finds it within this.
_PATIENCE = timedelta(minutes=5)
_SIOCGIFADDR = 0x8915
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def host_store(host: str) -> tuple[Store, str]:
    """Open a store at a free port of `host`; return it and the address for ranks elsewhere."""
    _choose_interface(host)
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
    _choose_interface(host)
    return TCPStore(host, int(port), is_master=False, timeout=_PATIENCE)


def _choose_interface(host: str) -> None:
    """Have gloo and NCCL use the network that `host` is in, unless the environment names one.

    Left alone they take what the machine's own name resolves to, often loopback."""
    interface = interface_towards(host)
    if interface is not None:
        for name in _INTERFACES:
            os.environ.setdefault(name, interface)


def interface_towards(host: str) -> str | None:
    """Return this machine's interface towards `host`; None where it cannot be told."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Sends nothing: only the route is looked up.
        probe.connect((host, 9))
        own = cast("str", probe.getsockname()[0])
        if ipaddress.ip_address(own).is_loopback:
            return "lo"
        names = [name for _, name in socket.if_nameindex()]
        return next((name for name in names if _interface_address(probe, name) == own), None)


def _interface_address(probe: socket.socket, interface: str) -> str | None:
    request: Any = struct.pack("256s", interface.encode()[:15])
    try:
        return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
    except OSError:
        # It has no address.
        return None
