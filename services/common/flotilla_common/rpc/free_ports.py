"""Ports for servers whose address must be known before they listen, or must outlast them."""

import random
import socket
from functools import cache
from pathlib import Path

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
# What other kernels than Linux give out: RFC 6335.
_DEFAULT_EPHEMERAL = "49152 65535"
# Ray's nodes listen on any port below these.
_FIRST, _LAST = 20_000, 65_535
_TRIES = 100
# Not the seeded generator: processes with equal seeds would choose equal ports.
_random = random.SystemRandom()


def free_port() -> int:
    """Return a free port that the kernel gives only to programs that name it.

    A port of the kernel's own choice would not do: once released, as by a server that is started
    again, it may become the local port of any connection. Raises RuntimeError when all ports that
    are tried are taken."""
    for _ in range(_TRIES):
        port = _random.choice(_named_ports())
        if _is_free(port):
            return port
    raise RuntimeError(f"all of {_TRIES} ports are taken; look at `ss -ltn` for who has them")


def free_address(host: str = "127.0.0.1") -> str:
    """Return `host` with a free port."""
    return f"{host}:{free_port()}"


@cache
def _named_ports() -> list[int]:
    given = _EPHEMERAL.read_text() if _EPHEMERAL.exists() else _DEFAULT_EPHEMERAL
    first, last = map(int, given.split())
    named = [port for port in range(_FIRST, _LAST + 1) if not first <= port <= last]
    # If the kernel gives out all of them, no port is better than another.
    return named or list(range(_FIRST, _LAST + 1))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
    return True
