"""Where machines elsewhere reach this one."""

import socket

from services.common.listen import is_loopback, joined

_ANYWHERE = {"", "0.0.0.0", "::"}
# Not contacted: connecting a datagram socket only asks the routing table.
_FAR_AWAY = ("192.0.2.1", 9)


class UnreachableHostError(ValueError):
    """Nobody elsewhere can call this machine; the message says what to set."""


def reachable(listened: str, advertise: str | None) -> str:
    """host:port of what listens on `listened`, for others. Raises UnreachableHostError."""
    host, _, port = listened.rpartition(":")
    host = host.strip("[]")
    if advertise is not None:
        return joined(advertise, int(port))
    if host in _ANYWHERE:
        host = _own_address()
    if is_loopback(host):
        raise UnreachableHostError(
            f"machines elsewhere cannot reach {listened}; set launcher.sky.advertise to a name or"
            " address of this machine that they can"
        )
    return joined(host, int(port))


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_FAR_AWAY)
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
