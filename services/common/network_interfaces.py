"""The network interfaces of this machine, and the one that gloo and NCCL are to use.

Needs nothing but the standard library: the doctor's probe imports it on every node."""

import fcntl
import ipaddress
import os
import socket
import struct
from typing import Any

# What gloo and NCCL heed.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915


def own_address(host: str) -> str:
    """Return this machine's address in the network in which it reaches `host`. Raises OSError.

    A name with addresses of both families stands for its IPv4 one: only by that is an interface
    found."""
    found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    family, kind, _, _, address = min(found, key=lambda info: info[0] is not socket.AF_INET)
    with socket.socket(family, kind) as probe:
        # Sends nothing: only the route is looked up.
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_towards(host: str) -> str | None:
    """Return the interface towards `host`; None where it cannot be determined, as for IPv6.

    Raises OSError without a route."""
    own = own_address(host)
    if ipaddress.ip_address(own).is_loopback:
        return "lo"
    return next((name for name in interface_names() if _ipv4_address(name) == own), None)


def choose_interface(host: str) -> str:
    """Make gloo and NCCL use the network of `host`, unless the environment names an interface.

    Left alone they take what the machine's own name resolves to, often loopback. Return this
    machine's address that results. Raises OSError."""
    interface = interface_towards(host)
    if interface is not None:
        for name in INTERFACE_VARIABLES:
            os.environ.setdefault(name, interface)
    return _ipv4_address(os.environ.get(INTERFACE_VARIABLES[0], "")) or own_address(host)


def interface_names() -> list[str]:
    """List the names of all interfaces."""
    return [name for _, name in socket.if_nameindex()]


def _ipv4_address(interface: str) -> str | None:
    """Return the IPv4 address of an interface; None if there is no such interface or it has no
    such address."""
    request: Any = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
        except OSError:
            return None
