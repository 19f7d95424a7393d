"""The address of a configured server, and the key that it requires."""

import os
import secrets
from collections.abc import Mapping

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.text.redaction import add_secret
from flotilla_env_gateway.adapters.supervised_server import (
    FixedAddress,
    ServerAddress,
    SupervisedServer,
)
from flotilla_env_gateway.config.backends import ServerConfig, is_reference

# The header that a supervised environment server requires; see flotilla_environments/serve.py.
_TOKEN_VARIABLE = "FLOTILLA_ENV_TOKEN"


def connect_server(config: ServerConfig, *, where: str) -> tuple[ServerAddress, dict[str, str]]:
    """Return the server's address and the headers that it requires; start its process if it is
    ours.

    Raises ConfigError, naming the key below `where`, if the API key is not in the environment."""
    key = _api_key(config, where=where)
    if config.fixed_url is not None:
        return FixedAddress(config.fixed_url), _bearer_header(key)
    assert config.command is not None, "the configuration has one of url and command"
    key = key or secrets.token_urlsafe(32)
    address = SupervisedServer(
        config.command,
        start_timeout_s=config.start_timeout_s,
        environment={**configured_environment(config, where=where), _TOKEN_VARIABLE: key},
    )
    return address, _bearer_header(key)


def configured_environment(config: ServerConfig, *, where: str) -> dict[str, str]:
    """Build the environment variables that the settings add to started processes. Raises
    ConfigError for a `$NAME` that is not set."""
    return resolve_references(config.env, where=f"{where}.env")


def resolve_references(values: Mapping[str, str], *, where: str) -> dict[str, str]:
    """Replace each `$NAME` by the variable's value, which is a secret from then on. Raises
    ConfigError for one that is not set."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if is_reference(value):
            given = os.environ.get(value[1:])
            if given is None:
                raise ConfigError(
                    f"{where}.{name} is {value}, which is not set in the environment; export"
                    " it, or take it out"
                )
            add_secret(given)
            value = given
        found[name] = value
    return found


def _api_key(config: ServerConfig, *, where: str) -> str | None:
    name = config.api_key_env
    if not name:
        return None
    key = os.environ.get(name)
    add_secret(key or "")
    # Our own server gets our own key.
    if not key and config.command is None:
        raise ConfigError(
            f"{where}.api_key_env names {name}, which is not set in the environment; export it, or "
            'set this to "" if the server requires no key'
        )
    return key


def _bearer_header(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}
