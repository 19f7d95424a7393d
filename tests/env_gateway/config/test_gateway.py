"""The section env_gateway of a run spec."""

from typing import Any

import pytest

from services.common.config import parse_config
from services.common.errors import ConfigError
from services.env_gateway.config.gateway import EnvGatewayConfig


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"backend": "mcp"}, "backends.mcp is not set"),
        ({"lease_ttl": 3}, "lease_ttl"),
        ({"backends": {"mcp": {"url": "ftp://x"}}}, "http"),
        ({"backends": {"mcp": {}}}, "url and command"),
        ({"limits": {"max_calls": 0}}, "max_calls"),
        (
            {"backends": {"mcp": {"url": "http://x", "parallel_reads": "listed"}}},
            'parallel_reads = "listed" needs read_only_tools',
        ),
        # One message at a time goes through its WebSocket.
        ({"backends": {"openenv": {"url": "http://x", "parallel_reads": "hinted"}}}, "parallel"),
    ],
)
def test_a_wrong_section_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(EnvGatewayConfig, section, where="spec [env_gateway]")
