"""The network interfaces of this machine, and the one that gloo and NCCL use."""

import fcntl
import ipaddress
import os
import socket
import struct
from typing import Any

# The variables that gloo and NCCL read.
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SIOCGIFADDR = 0x8915


def own_address(host: str) -> str:
    """Return this machine's address in the network in which it reaches `host`. Raises OSError.

    A name with addresses of both families counts as its IPv4 address: interfaces are found only by
    that."""
    found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
    family, kind, _, _, address = min(found, key=lambda info: info[0] is not socket.AF_INET)
    with socket.socket(family, kind) as probe:
        # This sends nothing: it only looks up the route.
        probe.connect(address)
        return str(probe.getsockname()[0])


def interface_towards(host: str) -> str | None:
    """Return the interface towards `host`; None if it cannot be determined, as for IPv6.

    Raises OSError without a route."""
    own = own_address(host)
    if ipaddress.ip_address(own).is_loopback:
        return "lo"
    return next((name for name in interface_names() if _ipv4_address(name) == own), None)


def choose_interface(host: str) -> str:
    """Make gloo and NCCL use the network of `host`, unless the environment names an interface.

    By default they use the address of the machine's own name, often loopback. Return this machine's
    address on the chosen interface. Raises OSError."""
    interface = interface_towards(host)
    if interface is not None:
        for name in INTERFACE_VARIABLES:
            os.environ.setdefault(name, interface)
    return _ipv4_address(os.environ.get(INTERFACE_VARIABLES[0], "")) or own_address(host)


def interface_names() -> list[str]:
    """List the names of all interfaces."""
    return [name for _, name in socket.if_nameindex()]


def suggest_network_fix() -> str:
    """Suggest how to open a blocked connection from this machine."""
    return (
        "let all TCP ports through between the two machines, or set GLOO_SOCKET_IFNAME and"
        " NCCL_SOCKET_IFNAME on both to the interface of the network that they share"
        f" (this machine has {', '.join(interface_names())})"
    )


def _ipv4_address(interface: str) -> str | None:
    """Return the IPv4 address of an interface; None if there is no such interface or address."""
    request: Any = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe, _SIOCGIFADDR, request)[20:24])
        except OSError:
            return None
