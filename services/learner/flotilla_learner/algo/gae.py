"""Advantages of single tokens: generalised advantage estimation, returns and whitening.

An attempt is one trajectory. Its policy tokens are the time steps, in the order of its sequences;
the reward comes with the last of them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# One value per policy token, float64.
TokenValues = NDArray[np.float64]

_VARIANCE_FLOOR = 1e-8


@dataclass(frozen=True, slots=True)
class GaeEstimate:
    """Advantages of one trajectory's tokens, and the returns a critic should have predicted."""

    advantages: TokenValues
    returns: TokenValues


def returns_to_go(rewards: TokenValues) -> TokenValues:
    """Return the undiscounted sum of the rewards from each token on."""
    return np.cumsum(rewards[::-1])[::-1]


def compute_gae(
    rewards: TokenValues, values: TokenValues, discount: float, decay: float
) -> GaeEstimate:
    """Generalised advantage estimation, arXiv 1506.02438, equation 16, over one trajectory.

    delta_t = r_t + discount * V_{t+1} - V_t with V = 0 after the end;
    A_t = sum over l of (discount * decay)^l * delta_{t+l}. Returns are A_t + V_t.
    """
    following = np.append(values[1:], 0.0)[: len(values)]
    deltas = rewards + discount * following - values
    advantages = deltas.copy()
    # Sums of 1, 2, 4, ... terms, in as many passes as the length has binary digits.
    terms = 1
    while terms < len(deltas):
        advantages[:-terms] += (discount * decay) ** terms * advantages[terms:]
        terms *= 2
    return GaeEstimate(advantages, advantages + values)


def whiten(values: TokenValues) -> TokenValues:
    """(x - mean) / sqrt(var + 1e-8) with the unbiased variance; exactly 0 if all are equal.

    The global normalisation of REINFORCE++, arXiv 2501.03262, over all tokens of a batch.
    """
    if len(values) == 0 or np.all(values == values[0]):
        return np.zeros_like(values)
    return (values - values.mean()) / np.sqrt(values.var(ddof=1) + _VARIANCE_FLOOR)
