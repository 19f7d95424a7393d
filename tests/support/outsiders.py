"""A run's identity, and outsiders to it, for tests of TLS over real sockets."""

import socket
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache

import grpc
import grpc.aio
import psutil
import pytest

from flotilla_common.rpc.tls import Tls, channel_credentials
from flotilla_launcher.security import certificates
from flotilla_launcher.security.certificates import RunIdentity

RUN = "run-1.5"
# Opens a channel to an address of the service named.
Open = Callable[[str, str], grpc.aio.Channel]
_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]


def run() -> RunIdentity:
    return of_one_authority()[0]


@cache
def other_run() -> RunIdentity:
    return certificates.mint_identity("another-run")


@cache
def same_name() -> RunIdentity:
    """Return the identity of a CA that any process could have made: the names are right."""
    return certificates.mint_identity(RUN)


@cache
def of_one_authority() -> tuple[RunIdentity, Tls, Tls]:
    """A run, and two rollouts of its own CA: one expired, one not yet valid."""
    now = datetime.now(UTC)
    authority = certificates._Authority(RUN, now)  # pyright: ignore[reportPrivateUsage]
    members = {service: authority.issue_member(service) for service in certificates.MEMBERS}
    strangers: list[Tls] = []
    for shift in (-certificates.VALIDITY - timedelta(days=1), timedelta(days=1)):
        authority._now = now + shift  # pyright: ignore[reportPrivateUsage]
        strangers.append(authority.issue_member("rollout"))
    return RunIdentity(RUN, "the-token-of-this-run", members), strangers[0], strangers[1]


def beyond_loopback() -> str:
    """Return an address of this machine that others could reach; skip the test without one."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if name in up and one.family is socket.AF_INET and not one.address.startswith("127."):
                return one.address
    pytest.skip("this machine has no address beyond loopback")


def outsiders() -> Mapping[str, Open]:
    """Return outsiders by what is wrong with each: they all have the right address, and some the
    right CA."""
    _, expired, too_early = of_one_authority()
    return {
        "plain text": lambda address, _: grpc.aio.insecure_channel(address, options=_OPTIONS),
        "no certificate": _secure(None),
        "another run's certificate": _secure(other_run().tls_for("rollout")),
        "another CA's certificate of the same name": _secure(same_name().tls_for("rollout")),
        "an expired certificate": _secure(expired),
        "a certificate from tomorrow": _secure(too_early),
        "another run's CA": _whole(other_run().tls_for("rollout")),
    }


def member(address: str, service: str) -> grpc.aio.Channel:
    """Open a channel as a rollout of the run, without a token."""
    return _secure(run().tls_for("rollout"))(address, service)


def _secure(shown: Tls | None) -> Open:
    """Trust the run, and present the given certificate, if any."""
    ours = run().tls_for("rollout")
    pair = (shown.key, shown.certificate) if shown else (None, None)
    credentials = grpc.ssl_channel_credentials(ours.ca, *pair)
    return lambda address, service: _channel(address, credentials, ours.name_of(service))


def _whole(shown: Tls) -> Open:
    """Trust the outsider's own CA as well."""
    name = run().tls_for("rollout").name_of
    return lambda address, service: _channel(address, channel_credentials(shown), name(service))


def _channel(address: str, credentials: grpc.ChannelCredentials, name: str) -> grpc.aio.Channel:
    options = [*_OPTIONS, ("grpc.ssl_target_name_override", name)]
    return grpc.aio.secure_channel(address, credentials, options=options)
