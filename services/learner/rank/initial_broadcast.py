"""Ranks of several machines begin with what the first one holds: nobody else sees its files.

All ranks call the same functions in the same order.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.learner.rank.data_parallel import Replicas
from services.learner.rank.model import Policy
from services.learner.rank.optimizer import Optimizer


@torch.no_grad()
def take_policy(policy: Policy, step: int, replicas: Replicas) -> int:
    """Gives the policy the first rank's parameters; returns the step behind them."""
    taken = torch.tensor([step], dtype=torch.int64)
    replicas.spread(taken)
    for parameter in policy.named_parameters().values():
        replicas.spread(parameter)
    return int(taken)


@torch.no_grad()
def take_state(
    optimizer: Optimizer, critic: Mapping[str, Tensor], replicas: Replicas
) -> dict[str, Tensor]:
    """Gives the optimizer the first rank's state; returns that of its critic, if it has one."""
    moments = _taken(optimizer.state(), replicas)
    if replicas.index > 0:
        optimizer.load_state(moments)
    return _taken(critic, replicas)


def _taken(tensors: Mapping[str, Tensor], replicas: Replicas) -> dict[str, Tensor]:
    """The first rank's tensors by name; what the others have under theirs does not count."""
    own = {name: [str(value.dtype), *value.shape] for name, value in tensors.items()}
    said = json.dumps(own).encode() if replicas.index == 0 else None
    kinds: dict[str, list[Any]] = json.loads(replicas.spread_bytes(said))
    taken: dict[str, Tensor] = {}
    for name, (dtype, *shape) in kinds.items():
        kind = getattr(torch, dtype.removeprefix("torch."))
        value = tensors[name] if replicas.index == 0 else torch.empty(shape, dtype=kind)
        replicas.spread(value)
        taken[name] = value
    return taken
