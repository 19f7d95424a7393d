"""TCP connectivity between the ranks of a ring: a process group itself only reports a timeout.

Runs with the standard library alone, on every node."""

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# What gloo and NCCL heed.
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# A firewall that drops is not heard from; a node of the same network answers in milliseconds.
_CONNECT_S = 5.0
_SIOCGIFADDR = 0x8915

SocketAddress = tuple[str, int]


def own_address(host: str) -> str:
    """Return this machine's address in the network in which it reaches `host`. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Sends nothing: only the route is looked up.
        probe.connect(address)
        return str(probe.getsockname()[0])


def listen_on(host: str) -> socket.socket:
    """Listen at a free port of `host`. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=64)


def select_interface(host: str) -> str:
    """Make gloo and NCCL use the network of `host`, unless the environment names an interface,
    as the training ranks do. Return the address of this rank that results. Raises OSError."""
    own = own_address(host)
    interface = _interface_of(own)
    for name in INTERFACES:
        if interface:
            os.environ.setdefault(name, interface)
    return _address_of(os.environ.get(INTERFACES[0], "")) or own


def find_unreachable(peers: Mapping[int, SocketAddress]) -> list[str]:
    """List the ranks that cannot be reached at these addresses, and why."""
    with ThreadPoolExecutor(max_workers=max(1, len(peers))) as pool:
        said = pool.map(_try_connect, peers.values())
        return [
            f"cannot reach rank {rank} at {host} port {port} ({text})"
            for (rank, (host, port)), text in zip(peers.items(), said, strict=True)
            if text
        ]


def _try_connect(address: SocketAddress) -> str:
    """Try to connect; return why that failed, or ""."""
    try:
        # That it is accepted takes nobody: the other side's kernel does it.
        socket.create_connection(address, timeout=_CONNECT_S).close()
    except TimeoutError:
        return "nothing comes back"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def suggest_network_fix(host: str) -> str:
    """Suggest how to open a blocked connection; written for the machine that could not connect."""
    interfaces = ", ".join(name for _, name in socket.if_nameindex())
    fix = (
        "let all TCP ports through between the two, or set GLOO_SOCKET_IFNAME and"
        " NCCL_SOCKET_IFNAME on both to the interface of the network that they share"
        f" (this side has {interfaces})"
    )
    if ipaddress.ip_address(host).is_loopback:
        return f"{fix}; through a tunnel no ring is made: name nodes by addresses of their network"
    return fix


def _interface_of(own: str) -> str | None:
    """Return the interface that has this address; None if it cannot be determined, as for IPv6."""
    if ipaddress.ip_address(own).is_loopback:
        return "lo"
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if _address_of(name) == own), None)


def _address_of(interface: str) -> str | None:
    """Return the IPv4 address of an interface; None if there is no such interface or it has no
    such address."""
    request: Any = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
        except OSError:
            return None
