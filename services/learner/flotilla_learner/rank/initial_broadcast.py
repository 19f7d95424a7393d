"""Broadcast of the first rank's state to ranks on other machines, which cannot read its files.

All ranks call the same functions in the same order."""

import json
from collections.abc import Iterable

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from flotilla_learner.rank.data_parallel import Replicas
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.sharding import local_tensor


@torch.no_grad()
def broadcast_policy(policy: Policy, step: int, replicas: Replicas) -> int:
    """Load the first rank's parameters, or adapters, into the policy; return its step."""
    taken = torch.tensor([step], dtype=torch.int64)
    replicas.broadcast_tensor(taken)
    broadcast_tensors(policy.trained_parameters().values(), replicas)
    return int(taken)


@torch.no_grad()
def broadcast_optimizer_state(optimizer: Optimizer, replicas: Replicas) -> None:
    """Load the first rank's state into the optimizer; for split tensors, the first machine's."""
    own = json.dumps(list(optimizer.state_tensors())).encode() if replicas.index == 0 else None
    names: list[str] = json.loads(replicas.broadcast_bytes(own))
    if not optimizer.state_tensors():
        optimizer.add_empty_state(names)
    state = optimizer.state_tensors()
    broadcast_tensors((state[name] for name in names), replicas)


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], replicas: Replicas) -> None:
    """Replace each tensor with the first rank's; a part, with that of the first machine's rank
    that holds the same part."""
    for tensor in tensors:
        _broadcast_part(tensor, replicas)


def _broadcast_part(tensor: Tensor, replicas: Replicas) -> None:
    if not isinstance(tensor, DTensor):
        replicas.broadcast_tensor(tensor)
        return
    dist.broadcast(local_tensor(tensor), group=tensor.device_mesh.get_group(0), group_src=0)
