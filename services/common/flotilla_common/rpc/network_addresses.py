"""Rules for addresses to listen on and to dial.

Without TLS all traffic of a service, including its token, is readable on the wire: then only
loopback is allowed, which no other machine can reach."""

import ipaddress

from flotilla_common.rpc.errors import ConfigError

_ANY = {"0.0.0.0", "::"}


def check_listen(address: str, *, encrypted: bool = False) -> tuple[str, int]:
    """Split `host:port`. Raises ConfigError if it is beyond loopback and not `encrypted`."""
    host, port = split_host_port(address, "listen")
    if not encrypted and not is_loopback(host):
        raise ConfigError(
            f"refusing to listen on {address}: without TLS only loopback is allowed; pass"
            " --tls-dir (the launcher mints one per run), or listen on 127.0.0.1:0 and reach it"
            " through an SSH tunnel"
        )
    return host, port


def check_dial(address: str, *, encrypted: bool) -> None:
    """Raise ConfigError if calls to `address` would leave this machine as plain text."""
    host, _ = split_host_port(address, "peer")
    if not encrypted and not is_loopback(host):
        raise ConfigError(
            f"refusing to call {address}: beyond loopback a token may travel only under TLS; pass"
            " --tls-dir (the launcher mints one per run), or reach it through an SSH tunnel"
        )


def advertised_address(host: str, port: int, advertise: str | None) -> str:
    """Return the address to publish after listening on `host` and `port`.

    `advertise` is a host, or host:port if the port is mapped too. Raises ConfigError."""
    if advertise is None:
        if host in _ANY:
            raise ConfigError(
                f"listening on {host} does not show how others reach this machine: pass"
                " --advertise HOST"
            )
        return join_host_port(host, port)
    mapped, colon, outer = advertise.rpartition(":")
    if colon and outer.isdecimal() and (":" not in mapped or mapped.endswith("]")):
        return join_host_port(_strip_brackets(mapped), int(outer))
    return join_host_port(_strip_brackets(advertise), port)


def join_host_port(host: str, port: int) -> str:
    """Return host:port, with brackets around a host that contains colons."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return True if only processes of this machine can be at `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def split_host_port(address: str, what: str) -> tuple[str, int]:
    """Split host:port of a `what` address, without brackets. Raises ConfigError."""
    host, colon, port = address.rpartition(":")
    bare = _strip_brackets(host)
    if not colon or not bare or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{what} address {address!r}: write host:port, as in 127.0.0.1:0")
    return bare, int(port)


def _strip_brackets(host: str) -> str:
    return host.removeprefix("[").removesuffix("]")
