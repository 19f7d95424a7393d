"""Buffers that weights are received into: of any size, each its own, and given back."""

import psutil
import pytest
import torch

from flotilla_common.tensors.host_buffers import host_buffer

MIB = 2**20


@pytest.mark.parametrize("size", [0, 1, 2 * MIB - 1, 2 * MIB, 5 * MIB + 3])
def test_a_buffer_keeps_what_is_written_whatever_becomes_of_others(size: int) -> None:
    first, second = host_buffer(size).fill_(1), host_buffer(size).fill_(2)
    view = first[size // 2 :].view(-1)
    del first
    assert view.dtype is torch.uint8
    assert bool((view == 1).all())
    assert bool((second == 2).all())
    assert len(second) == size


def test_a_buffer_that_no_tensor_refers_to_takes_no_memory() -> None:
    before = psutil.Process().memory_info().rss
    kept = host_buffer(0)
    for _ in range(8):
        kept = host_buffer(64 * MIB).fill_(1)[:10]
    assert kept.tolist() == [1] * 10
    assert psutil.Process().memory_info().rss - before < 200 * MIB
