"""Padded matrices of the fixtures as the packed tokens of the learner, and what agreement is."""

from collections.abc import Container, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.parity.fixtures import Case, load

PEERS = ("trl", "verl", "skyrl", "prime_rl")
CASES: tuple[Case, ...] = tuple(case for peer in PEERS for case in load(peer))
TOLERANCE = 1e-6


def chosen(
    term: str, names: Iterable[str], but: Container[tuple[str, str]] = ()
) -> dict[str, Case]:
    """The cases of a term that go by these names, without those (peer, name), by peer-name."""
    wanted = set(names)
    return {
        f"{case.peer}-{case.name}": case
        for case in CASES
        if case.term == term and case.name in wanted and (case.peer, case.name) not in but
    }


def each(cases: Mapping[str, Case]) -> pytest.MarkDecorator:
    """Runs a test with every one of them as `case`."""
    return pytest.mark.parametrize("case", list(cases.values()), ids=list(cases))


def case(peer: str, term: str, name: str) -> Case:
    return next(c for c in CASES if (c.peer, c.term, c.name) == (peer, term, name))


class Packed:
    """The matrices of a case's inputs without what its mask takes away."""

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        self._inputs = inputs
        self._mask = torch.tensor(inputs["mask"], dtype=torch.bool)
        self.count = len(self._mask)
        # Which sequence each token belongs to, and how many each has.
        self.sequence = self._mask.nonzero()[:, 0]
        self.lengths = [int(length) for length in self._mask.sum(1)]

    def __getitem__(self, name: str) -> Tensor:
        """One of the inputs, [tokens] float64."""
        return self.of(self._inputs[name])

    def of(self, matrix: Any) -> Tensor:
        """A matrix of the peer's, [tokens] float64."""
        return torch.tensor(matrix, dtype=torch.float64)[self._mask]

    def rows(self, matrix: Any) -> list[NDArray[np.float64]]:
        """The same, sequence by sequence."""
        return [part.numpy() for part in self.of(matrix).split(self.lengths)]


def gradient_of(loss: Tensor, leaf: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return gradient


def agree(ours: Any, theirs: Any, tolerance: float = TOLERANCE) -> None:
    """Relative to each value, or to the largest where that is below 1."""
    left, right = (torch.as_tensor(value, dtype=torch.float64) for value in (ours, theirs))
    largest = float(right.abs().max()) if right.numel() else 0.0
    torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance * min(1.0, largest))


def differ(ours: Any, theirs: Any) -> bool:
    """Return whether a named difference is one: far beyond the tolerance."""
    left, right = (torch.as_tensor(value, dtype=torch.float64) for value in (ours, theirs))
    return bool(((left - right).abs() > 10 * TOLERANCE * right.abs().clamp(min=1e-3)).any())
