"""Address at which other machines reach this one."""

import ipaddress
import os
import socket
from collections.abc import Mapping

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.weights.network_interfaces import own_address
from flotilla_launcher.backends.ports import BackendError, LaunchSpec
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.run_spec import machines_key

ADDRESS_VARIABLE = "FLOTILLA_ADDRESS"
# An address of a documentation network (RFC 5737).
_ELSEWHERE = "192.0.2.1"


def route_address() -> str:
    """Return the source address of packets to other machines, without sending any. Raises OSError
    if there is no route."""
    return own_address(_ELSEWHERE)


def find_own_host(config: LauncherConfig, environ: Mapping[str, str] = os.environ) -> str:
    """Return the address at which further machines of a run reach this one; "" if it has none.

    Raises ConfigError if no other machine reaches it, or it is not an address of this machine."""
    if config.backend != "local" or config.local.network == "loopback":
        return ""
    given = environ.get(ADDRESS_VARIABLE, "")
    try:
        return _check_is_ours(given) if given else route_address()
    except OSError as error:
        raise ConfigError(
            'launcher.local.network = "private": no route shows the address at which others reach'
            f" this machine ({error.strerror}); set {ADDRESS_VARIABLE} to it"
        ) from error


def check_further_machines(launch: LaunchSpec) -> None:
    """Raise BackendError if a replica of several machines is on loopback, which the others cannot
    reach, or is one of several replicas, which would all start on this machine."""
    service, index = launch.key
    nodes, config = launch.spec.machines_of(service), launch.spec.config
    if nodes == 1:
        return
    if index or config.replica_counts()[service] > 1:
        raise BackendError(
            f"{machines_key(service)} = {nodes}: of a service whose replicas are several machines"
            f" this backend runs one; set launcher.{service}.replicas = 1"
        )
    if config.local.network == "loopback":
        raise BackendError(
            f"{machines_key(service)} = {nodes}, but its further machines do not reach this one's"
            ' loopback; set launcher.local.network = "private", and run `flotilla join` on each of'
            " them"
        )


def _check_is_ours(address: str) -> str:
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        raise ConfigError(
            f"{ADDRESS_VARIABLE}={address} is not an IP address; set it to this machine's own"
        ) from None
    if known.is_loopback or known.is_unspecified:
        raise ConfigError(
            f"{ADDRESS_VARIABLE}={address}: no other machine reaches this one there; set it to this"
            " machine's own address in the network that it shares with them"
        )
    family = socket.AF_INET if known.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        raise ConfigError(
            f"{ADDRESS_VARIABLE}={address} is no address of this machine ({error.strerror}); set it"
            " on each machine to its own"
        ) from error
    return address
