"""Servers of environments, and gateways, that start fast."""

from urllib.parse import urlsplit

import psutil

from tests.support.process_forge import shared_forge


def environment_command(*words: str) -> tuple[str, ...]:
    """Return a command that runs Python with these words, `-m` and a module of environments or of
    the gateway first, in a process that has imported them."""
    return shared_forge("tests.support.forged_environments").python_command(*words)


def server_pid(url: str) -> int:
    """Return the process that listens at a URL: what such a command starts stands in for it."""
    port = urlsplit(url).port
    [pid] = {
        each.pid or 0
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr and each.laddr.port == port
    }
    return pid
