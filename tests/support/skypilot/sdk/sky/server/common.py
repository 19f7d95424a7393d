"""The check for a server."""

from sky import transport


def check_server_healthy() -> None:
    transport.post("health", {})
