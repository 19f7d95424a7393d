"""The first rank's state, broadcast to ranks on other machines, which do not see its files.

All ranks call the same functions in the same order."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.learner.rank.data_parallel import Replicas
from services.learner.rank.model import Policy
from services.learner.rank.optimizer import Optimizer


@torch.no_grad()
def broadcast_policy(policy: Policy, step: int, replicas: Replicas) -> int:
    """Give the policy the first rank's parameters; return the step behind them."""
    taken = torch.tensor([step], dtype=torch.int64)
    replicas.broadcast_tensor(taken)
    for parameter in policy.named_parameters().values():
        replicas.broadcast_tensor(parameter)
    return int(taken)


@torch.no_grad()
def broadcast_optimizer_state(optimizer: Optimizer, replicas: Replicas) -> None:
    """Give the optimizer the first rank's state."""
    moments = broadcast_named(optimizer.state_tensors(), replicas)
    if replicas.index > 0:
        optimizer.load_state(moments)


@torch.no_grad()
def broadcast_named(tensors: Mapping[str, Tensor], replicas: Replicas) -> dict[str, Tensor]:
    """Return the first rank's tensors by name, whatever the others hold under those names."""
    own = {name: [str(value.dtype), *value.shape] for name, value in tensors.items()}
    said = json.dumps(own).encode() if replicas.index == 0 else None
    kinds: dict[str, list[Any]] = json.loads(replicas.broadcast_bytes(said))
    taken: dict[str, Tensor] = {}
    for name, (dtype, *shape) in kinds.items():
        kind = getattr(torch, dtype.removeprefix("torch."))
        value = tensors[name] if replicas.index == 0 else torch.empty(shape, dtype=kind)
        replicas.broadcast_tensor(value)
        taken[name] = value
    return taken
