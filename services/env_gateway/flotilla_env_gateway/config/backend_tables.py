"""The table of each backend, `[env_gateway.backends]`."""

import json
from collections.abc import Mapping
from typing import Any, cast

from flotilla_common.spec.config import SECRET_KEY, ConfigModel
from flotilla_common.text.redaction import find_references, is_secret_name
from flotilla_env_gateway.config.backends import (
    EmbeddedConfig,
    FleetConfig,
    FleetOpenEnvConfig,
    ReplayConfig,
)
from flotilla_env_gateway.config.openenv import OpenEnvConfig


class BackendsConfig(ConfigModel):
    """Settings by backend; unused ones may stay in the file."""

    fleet: FleetConfig | None = None
    openenv: OpenEnvConfig | None = None
    fleet_openenv: FleetOpenEnvConfig = FleetOpenEnvConfig()
    embedded: EmbeddedConfig = EmbeddedConfig()
    replay: ReplayConfig | None = None

    @classmethod
    def explain_former(cls, key: str, value: Any) -> str:
        if key != "mcp":
            return ""
        table = cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}
        lines = [
            f"{key} = {_as_toml(item, key)}" for key, item in {"name": "server", **table}.items()
        ]
        text = "\n    ".join(["[[env_gateway.servers]]", *lines])
        return (
            "this table is now one of a list of servers, each with a name; write, after the other"
            f" keys of [env_gateway],\n    {text}"
        )


def _as_toml(value: Any, name: str) -> str:
    """Return a value as TOML; one that may be a secret as an ellipsis."""
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        # Any header may be a secret, whatever its name.
        secrets = name == "headers"
        texts = (
            f"{_quoted(key)} = {_as_toml(item, 'secret' if secrets else key)}"
            for key, item in items
        )
        return f"{{ {', '.join(texts)} }}"
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return f"[{', '.join(_as_toml(item, '') for item in items)}]"
    secret = is_secret_name(name) or SECRET_KEY.search(name) or name.lower() == "authorization"
    if secret and name != "api_key_env" and not any(find_references(value)):
        return '"..."'
    return _quoted(value)


def _quoted(value: Any) -> str:
    # Strings, numbers and booleans are written in TOML as in JSON.
    return json.dumps(value, ensure_ascii=False)
