"""Ports that no other process gets before their server."""

import socket
from pathlib import Path

import pytest

from flotilla_common.rpc import free_ports
from flotilla_common.rpc.free_ports import free_address, free_port


def test_the_kernel_gives_a_free_port_to_no_connection() -> None:
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = {free_port() for _ in range(50)}
    assert len(ports) > 40, "processes that choose at once choose the same"
    assert not ports & set(range(first, last + 1))


def test_a_port_that_is_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, free = free_port(), free_port()
    monkeypatch.setattr(free_ports, "_named_ports", lambda: [taken, free])
    with socket.create_server(("127.0.0.1", taken)):
        assert {free_port() for _ in range(20)} == {free}
        monkeypatch.setattr(free_ports, "_named_ports", lambda: [taken])
        with pytest.raises(RuntimeError, match="ports are taken"):
            free_port()


def test_a_server_can_listen_at_a_free_address() -> None:
    host, _, port = free_address().partition(":")
    with socket.create_server((host, int(port))):
        assert host == "127.0.0.1"
