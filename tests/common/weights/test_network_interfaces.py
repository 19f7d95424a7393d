"""The interface towards a host, and what gloo and NCCL are made to use."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flotilla_common.weights import network_interfaces
from flotilla_common.weights.network_interfaces import (
    INTERFACE_VARIABLES,
    choose_interface,
    interface_names,
    interface_towards,
    own_address,
)

ROOT = Path(__file__).parents[3]


def test_any_address_of_this_machine_is_reached_by_loopback() -> None:
    assert interface_towards("127.0.0.1") == interface_towards("127.0.0.2") == "lo"
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert "lo" in interface_names()


def test_the_interface_of_an_address_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_interfaces, "own_address", lambda host: "10.1.2.3")
    monkeypatch.setattr(network_interfaces, "interface_names", lambda: ["lo", "here", "there"])
    addresses = {"lo": "127.0.0.1", "here": None, "there": "10.1.2.3"}
    monkeypatch.setattr(network_interfaces, "_ipv4_address", addresses.get)
    assert interface_towards("10.9.9.9") == "there"
    addresses["there"] = "10.1.2.4"
    assert interface_towards("10.9.9.9") is None


def test_a_name_with_addresses_of_both_families_stands_for_its_ipv4_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind = socket.SOCK_DGRAM
    both = [
        (socket.AF_INET6, kind, 17, "", ("::1", 9, 0, 0)),
        (socket.AF_INET, kind, 17, "", ("127.0.0.1", 9)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    assert own_address("node-0") == "127.0.0.1"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both[:1])
    assert own_address("node-0") == "::1"


def test_gloo_and_nccl_use_it_unless_the_environment_names_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in INTERFACE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(INTERFACE_VARIABLES[1], "named")
    assert choose_interface("127.0.0.1") == "127.0.0.1"
    assert [os.environ[name] for name in INTERFACE_VARIABLES] == ["lo", "named"]
    monkeypatch.setenv(INTERFACE_VARIABLES[0], "no-such")
    assert choose_interface("127.0.0.2") == "127.0.0.1"


def test_nothing_but_the_standard_library_is_needed() -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "import flotilla_common.weights.network_interfaces;"
        "print([m for m in sys.modules if m.split('.')[0] not in"
        " {*sys.stdlib_module_names, 'flotilla_common', '__main__'} and '__editable__' not in m])"
    )
    command = (sys.executable, "-I", "-S", "-c", program, str(ROOT / "services/common"))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
