"""Mixtures of experts, as described by a model's config.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import PolicyConfig

# Keys by which model families give the number of experts, and of experts per token.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")


def count_experts(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many experts a layer has, and how many of them a token uses; 0 for a dense
    model."""
    inner: Mapping[str, Any] = settings.get("text_config") or settings
    return _first_number(inner, _EXPERTS), _first_number(inner, _CHOSEN)


def check_routing_replay(policy: PolicyConfig, folder: Path) -> None:
    """Refuse `policy.routing_replay` for a model without experts. Raises ConfigError."""
    if policy.routing_replay == "off":
        return
    settings = json.loads((folder / "config.json").read_text())
    if not all(count_experts(settings)):
        raise ConfigError(
            f'policy.routing_replay: "{policy.routing_replay}", but {policy.model} has no experts;'
            ' set it to "off"'
        )


def _first_number(settings: Mapping[str, Any], names: tuple[str, ...]) -> int:
    found = (settings.get(name) for name in names)
    return next((value for value in found if isinstance(value, int)), 0)
