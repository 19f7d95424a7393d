"""Sums and means over the tokens of each sequence of a pack."""

from torch import Tensor


def sequence_sums(values: Tensor, sequence: Tensor, count: int) -> Tensor:
    """Return [count]: the sum of `values` [n] over the tokens of each sequence; 0 without any."""
    return values.new_zeros(count).index_add(0, sequence, values)


def sequence_means(values: Tensor, sequence: Tensor, count: int) -> Tensor:
    """Return [count]: the mean of `values` [n] over the tokens of each sequence; 0 without any."""
    lengths = values.new_zeros(count).index_add(0, sequence, values.new_ones(len(values)))
    return sequence_sums(values, sequence, count) / lengths.clamp(min=1)
