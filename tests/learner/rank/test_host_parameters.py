"""Offloaded updates are those of the device, in memory that was taken once."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.rank.host_parameters import allocate_like
from flotilla_learner.rank.optimizer import Optimizer
from tests.support.tiny_ranks import make_batch, make_trainer, parameters, same_bits


def random_parameters() -> dict[str, nn.Parameter]:
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = [(7, 5), (3,), (33, 4), (1,)]
    return {f"p{i}": nn.Parameter(torch.randn(shape)) for i, shape in enumerate(shapes)}


def watch_gradients(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Return the addresses of the gradients that each update of AdamW reads."""
    seen: list[list[int]] = []
    plain = torch.optim.AdamW.step

    def step(self: torch.optim.AdamW, *rest: Any) -> object:
        held = [p.grad for group in self.param_groups for p in group["params"]]
        seen.append([grad.data_ptr() for grad in held if grad is not None])
        return plain(self, *rest)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    return seen


def test_gradients_come_to_the_same_memory_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    held, kept = random_parameters(), list[Tensor]()
    optimizer = Optimizer(held, OptimizerConfig(), offload=True)
    seen = watch_gradients(monkeypatch)
    for _ in range(3):
        for parameter in held.values():
            parameter.grad = torch.randn_like(parameter)
            # Else the next one could be where it was.
            kept.append(parameter.grad)
        optimizer.step(1e-2)
    assert seen[0] == seen[1] == seen[2]
    assert not {grad.data_ptr() for grad in kept} & set(seen[0])


def test_offloaded_steps_are_bit_for_bit_those_of_the_device(model_folder: Path) -> None:
    found: list[dict[str, Tensor]] = []
    for offload in (False, True):
        policy, optimizer, trainer = make_trainer(model_folder, offload=offload)
        for step in (1, 2, 3):
            trainer.train_step(make_batch(step=step), lr=1e-2)
        found.append({**parameters(policy), **optimizer.state_tensors()})
    assert same_bits(*found)


def test_a_parameter_without_a_gradient_stays_as_it_is() -> None:
    held = random_parameters()
    optimizer = Optimizer(held, OptimizerConfig(), offload=True)
    for name in ("p0", "p1"):
        held[name].grad = torch.ones_like(held[name])
    optimizer.step(1e-2)
    before = {name: value.detach().clone() for name, value in held.items()}
    held["p0"].grad = torch.ones_like(held["p0"])
    optimizer.step(1e-2)
    assert [bool((held[name] != before[name]).any()) for name in held] == [True, *[False] * 3]


def test_tensors_share_blocks_and_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def take(size: int, *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        assert pin_memory
        taken.append(size)
        return torch.zeros(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", take)
    wanted = {f"t{i}": torch.zeros(count) for i, count in enumerate([3, 1000, 70, 33000, 129, 0])}
    found = allocate_like(wanted, locked=True)
    spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in found.values() if len(t))
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(start % 64 == spans[0][0] % 64 for start, _ in spans)
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in wanted.items()}
    assert taken == [2**18]
