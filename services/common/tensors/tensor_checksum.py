"""The checksum of `services/common/fingerprint.py` over torch's tensors, on their own device."""

import torch
from torch import Tensor

_MULTIPLIER = 0x9E3779B97F4A7C15
_LENGTH_FACTOR = 0xD6E8FEB86659FD93
_MASK = (1 << 64) - 1
# 256 KiB of words and as much of multipliers stay in a CPU's cache; a GPU wants few launches.
_CHUNK_WORDS = 1 << 15
_DEVICE_CHUNK_WORDS = 1 << 24


def _to_signed(value: int) -> int:
    """Return a 64-bit pattern as torch's int64, which wraps as uint64 does."""
    return value - (1 << 64) if value >> 63 else value


def checksum64(data: Tensor) -> int:
    """`services.common.fingerprint.checksum64` of a uint8 tensor, on its own device."""
    count = data.numel()
    if count == 0:
        return 0
    padding = -count % 8
    if padding or data.storage_offset() % 8:
        data = torch.cat([data, data.new_zeros(padding)])
    words = data.view(torch.int64)
    total = 0
    chunk = _CHUNK_WORDS if data.device.type == "cpu" else _DEVICE_CHUNK_WORDS
    for start in range(0, len(words), chunk):
        part = words[start : start + chunk]
        index = torch.arange(start + 1, start + 1 + len(part), device=data.device)
        multipliers = index.mul_(_to_signed(_MULTIPLIER)).bitwise_or_(1)
        total += int(multipliers.mul_(part).sum())
    return (total + count * _LENGTH_FACTOR) & _MASK
