"""TCP connectivity between the ranks of a ring: a process group itself only reports a timeout.

Runs with the standard library alone, on every node."""

import ipaddress
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from services.common.weights.network_interfaces import interface_names

# A firewall that drops never answers; a node of the same network answers in milliseconds.
_CONNECT_S = 5.0

SocketAddress = tuple[str, int]


def listen_on(host: str) -> socket.socket:
    """Listen at a free port of `host`. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=64)


def find_unreachable(peers: Mapping[int, SocketAddress]) -> list[str]:
    """List the ranks that cannot be reached at these addresses, and why."""
    with ThreadPoolExecutor(max_workers=max(1, len(peers))) as pool:
        failures = pool.map(_try_connect, peers.values())
        return [
            f"cannot reach rank {rank} at {host} port {port} ({text})"
            for (rank, (host, port)), text in zip(peers.items(), failures, strict=True)
            if text
        ]


def _try_connect(address: SocketAddress) -> str:
    """Try to connect; return the failure, or ""."""
    try:
        # The other side's kernel accepts the connection, without its process.
        socket.create_connection(address, timeout=_CONNECT_S).close()
    except TimeoutError:
        return "nothing comes back"
    except OSError as error:
        return error.strerror or str(error)
    return ""


def suggest_network_fix(host: str) -> str:
    """Suggest how to open a blocked connection; written for the machine that could not connect."""
    interfaces = ", ".join(interface_names())
    fix = (
        "let all TCP ports through between the two, or set GLOO_SOCKET_IFNAME and"
        " NCCL_SOCKET_IFNAME on both to the interface of the network that they share"
        f" (this side has {interfaces})"
    )
    if ipaddress.ip_address(host).is_loopback:
        return f"{fix}; through a tunnel no ring is made: name nodes by addresses of their network"
    return fix
