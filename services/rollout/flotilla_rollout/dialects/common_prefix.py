"""The common prefix of two token sequences."""

from collections.abc import Sequence


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next(
        (number for number, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second))
    )
