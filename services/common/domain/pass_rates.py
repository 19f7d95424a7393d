"""Passes among the attempts at a task: what a pass is, and pass@k. Pure."""

import math

# A reward of at least this is a pass.
PASS_REWARD = 1.0


def pass_at_k(attempts: int, passed: int, k: int) -> float:
    """Return the probability that k of the attempts, drawn without replacement, hold a pass.

    1 - C(n - c, k) / C(n, k) for n attempts and c passes: unbiased, see arXiv 2107.03374, equation
    1."""
    if k > attempts:
        raise ValueError(f"pass@{k} needs {k} attempts, got {attempts}")
    return 1.0 - math.comb(attempts - passed, k) / math.comb(attempts, k)
