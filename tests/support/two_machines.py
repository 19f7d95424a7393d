"""Two machines with a network between them, for tests: network namespaces and a cable."""

import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager

import pytest

NAMES = ("flotilla-a", "flotilla-b")
# The address of the first.
HOST = "10.77.0.1"
_CABLE = "cable0"


@contextmanager
def two_machines() -> Generator[None]:
    """Namespaces with the addresses 10.77.0.1 and 10.77.0.2, and a cable."""
    if (
        shutil.which("ip") is None
        or subprocess.run(("unshare", "-n", "true"), check=False).returncode
    ):
        pytest.skip("making network namespaces needs root and iproute2")
    for name in NAMES:
        # A killed test has left them behind.
        subprocess.run(("ip", "netns", "del", name), stderr=subprocess.DEVNULL, check=False)
        _ip("netns", "add", name)
    try:
        first, second = NAMES
        cable = ("link", "add", _CABLE, "netns", first, "type", "veth")
        _ip(*cable, "peer", _CABLE, "netns", second)
        for number, name in enumerate(NAMES, 1):
            _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", _CABLE)
            for device in ("lo", _CABLE):
                _ip("-n", name, "link", "set", device, "up")
        yield
    finally:
        for name in NAMES:
            _ip("netns", "del", name)


def pull_cable() -> None:
    """Cut the connection between the machines."""
    _ip("-n", NAMES[1], "link", "set", _CABLE, "down")


def drop_connections(open_port: int | None) -> None:
    """Have the second machine drop what comes from the first but for `open_port`, as a firewall
    does."""
    rule = ("-n", NAMES[1], "rule")
    # The kernel's first rule would deliver everything.
    _ip(*rule, "add", "pref", "100", "lookup", "local")
    _ip(*rule, "del", "pref", "0")
    tcp = ("iif", _CABLE, "from", HOST, "ipproto", "tcp")
    if open_port is not None:
        _ip(*rule, "add", "pref", "1", *tcp, "sport", str(open_port), "lookup", "local")
    _ip(*rule, "add", "pref", "2", *tcp, "blackhole")


def inside(name: str) -> tuple[str, ...]:
    """Return the beginning of the command of a process on a machine."""
    return ("ip", "netns", "exec", name)


def _ip(*words: str) -> None:
    subprocess.run(("ip", *words), check=True)
