"""The section env_gateway of a run spec."""

import tomllib
from typing import Any

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_env_gateway.config.gateway import EnvGatewayConfig


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"backend": "mcp"}, r"no table \[\[env_gateway.servers\]\]"),
        ({"lease_ttl": 3}, "lease_ttl"),
        ({"servers": [{"url": "ftp://x"}]}, "http"),
        ({"servers": [{}]}, "url and command"),
        ({"servers": [{"command": ["flotilla", "env_serve"]}]}, "mean `flotilla env serve`"),
        ({"limits": {"max_calls": 0}}, "max_calls"),
        (
            {"environments": {"e": {"grading": "judge", "verifier": "v.py"}}},
            'it never runs with grading = "judge"',
        ),
        ({"environments": {"e": {"grading": "llm"}}}, "e.grading"),
        (
            {"servers": [{"url": "http://x", "parallel_reads": "listed"}]},
            'parallel_reads = "listed" needs read_only_tools',
        ),
        # One message at a time goes through its WebSocket.
        ({"backends": {"openenv": {"url": "http://x", "parallel_reads": "hinted"}}}, "parallel"),
    ],
)
def test_a_wrong_section_is_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(EnvGatewayConfig, section, where="spec [env_gateway]")


def test_the_former_table_of_mcp_is_refused_with_the_one_that_replaces_it() -> None:
    env = {"TOKEN": "$TOKEN", "API_KEY": "secret", "MODE": "x"}
    command = ["serve", 'a "b"']
    headers = {"x-auth": "secret", "x-user": "$USER_KEY"}
    table = {
        **{"transport": "stdio", "command": command, "env": env, "headers": headers},
        "listen": True,
    }
    with pytest.raises(ConfigError) as caught:
        parse_config(
            EnvGatewayConfig, {"backends": {"mcp": table}}, where="spec", section="env_gateway"
        )
    message = str(caught.value)
    assert "env_gateway.backends.mcp: this table is now one of a list of servers" in message
    text = "[[env_gateway.servers]]" + message.partition("[[env_gateway.servers]]")[2]
    written = tomllib.loads(text)["env_gateway"]["servers"][0]
    assert written == {
        **table,
        "name": "server",
        "env": {**env, "API_KEY": "..."},
        "headers": {**headers, "x-auth": "..."},
    }
    assert "secret" not in message


def test_servers_need_names_of_their_own_and_environments_name_known_ones() -> None:
    servers = [{"url": "http://a"}, {"url": "http://b"}]
    with pytest.raises(ConfigError, match="servers: two are named 'server'"):
        parse_config(EnvGatewayConfig, {"servers": servers}, where="spec")
    section = {"servers": servers[:1], "environments": {"x": {"servers": ["files"]}}}
    with pytest.raises(ConfigError, match=r"x\.servers: .*'files'; those in .*: server"):
        parse_config(EnvGatewayConfig, section, where="spec")


def test_a_replay_replaces_the_backends_and_servers_of_all_environments() -> None:
    section = {
        "servers": [{"name": "a", "url": "http://a"}],
        "environments": {"booking": {"backend": "fleet"}, "shop": {"servers": ["a"]}},
        "backends": {"replay": {"run": "runs/one"}},
        "backend": "replay",
    }
    config = parse_config(EnvGatewayConfig, section, where="spec", section="env_gateway")
    assert config.backend_names == {"replay"} and not config.servers
    assert config.backend_of("booking") == config.backend_of("shop") == "replay"
    assert config.backends.replay and str(config.backends.replay.run) == "runs/one"
    assert not config.environments["shop"].servers
    own = section | {"environments": {"booking": {"backend": "replay"}}, "backend": "embedded"}
    with pytest.raises(ConfigError, match="booking"):
        parse_config(EnvGatewayConfig, own, where="spec", section="env_gateway")
