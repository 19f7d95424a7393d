"""Passes among the attempts at a task: what a pass is, pass@k and pass^k. Pure."""

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


def pass_power_k(attempts: int, passed: int, k: int) -> float:
    """Return pass^k, the probability that k of the attempts, drawn without replacement, all pass.

    C(c, k) / C(n, k) for n attempts and c passes: unbiased, see tau-bench, arXiv 2406.12045,
    section 3."""
    if k > attempts:
        raise ValueError(f"pass^{k} needs {k} attempts, got {attempts}")
    return math.comb(passed, k) / math.comb(attempts, k)
