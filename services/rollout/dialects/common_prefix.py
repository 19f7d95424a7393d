"""The start that two runs of tokens share."""

from collections.abc import Sequence


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens both begin with."""
    pairs = zip(first, second, strict=False)
    return next(
        (number for number, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second))
    )
