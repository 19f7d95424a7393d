"""Which addresses may be listened on."""

import ipaddress

from services.common.errors import ConfigError


def check_listen(address: str) -> tuple[str, int]:
    """`host:port` split, if it is on loopback; raises ConfigError otherwise.

    Everything a service says is readable on the wire, so that other machines must not reach it.
    """
    host, colon, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not colon or not bare or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"listen address {address!r}: write host:port, as in 127.0.0.1:0")
    if not _is_loopback(bare):
        raise ConfigError(
            f"refusing to listen on {address}: without TLS only loopback is allowed, and TLS is"
            " not available yet; listen on 127.0.0.1:0 and reach it through an SSH tunnel"
        )
    return bare, int(port)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
