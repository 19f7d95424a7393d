"""The first rank's state, broadcast to ranks on other machines, which do not see its files.

All ranks call the same functions in the same order."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from services.learner.rank.data_parallel import Replicas
from services.learner.rank.model import Policy
from services.learner.rank.optimizer import Optimizer
from services.learner.rank.sharding import local_tensor


@torch.no_grad()
def broadcast_policy(policy: Policy, step: int, replicas: Replicas) -> int:
    """Give the policy the first rank's parameters, or adapters; return the step behind them."""
    taken = torch.tensor([step], dtype=torch.int64)
    replicas.broadcast_tensor(taken)
    for parameter in policy.trained_parameters().values():
        _broadcast_part(parameter, replicas)
    return int(taken)


@torch.no_grad()
def broadcast_optimizer_state(optimizer: Optimizer, replicas: Replicas) -> None:
    """Give the optimizer the first rank's state; of what is split, the first machine's."""
    said = json.dumps(list(optimizer.state_tensors())).encode() if replicas.index == 0 else None
    names: list[str] = json.loads(replicas.broadcast_bytes(said))
    if not optimizer.state_tensors():
        optimizer.add_empty_state(names)
    state = optimizer.state_tensors()
    for name in names:
        _broadcast_part(state[name], replicas)


def _broadcast_part(tensor: Tensor, replicas: Replicas) -> None:
    """Replace the tensor by the first rank's; a part, by that of the rank of the first machine
    with the same one."""
    if not isinstance(tensor, DTensor):
        replicas.broadcast_tensor(tensor)
        return
    dist.broadcast(local_tensor(tensor), group=tensor.device_mesh.get_group(0), group_src=0)


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
