"""The checksum of `common/weights/fingerprint.py` over torch's tensors, on their own device."""

import torch
from torch import Tensor

_MULTIPLIER = 0x9E3779B97F4A7C15
_LENGTH_FACTOR = 0xD6E8FEB86659FD93
CHECKSUM_MASK = (1 << 64) - 1
# An even number of words: 1 MiB stays in a CPU's cache, and a GPU needs few launches.
_ROW_WORDS = 1 << 8
_CHUNK_ROWS = 1 << 9
_DEVICE_CHUNK_ROWS = 1 << 20


def checksum64(data: Tensor, start: int = 0) -> int:
    """Return `flotilla_common.weights.fingerprint.checksum64` of a uint8 tensor, on its own device.

    Sums over rows and places are separate, as there. For a piece that begins at `start`, a multiple
    of 16, of larger data, return its share: the shares of all pieces add up to the checksum."""
    count = data.numel()
    if count == 0:
        return 0
    # Only the incomplete row is copied; padding with zeros changes nothing.
    whole = count // (8 * _ROW_WORDS) * 8 * _ROW_WORDS if data.storage_offset() % 8 == 0 else 0
    rest = data[whole:]
    rest = torch.cat([rest, rest.new_zeros(-len(rest) % (8 * _ROW_WORDS))])
    parts = [part for part in (data[:whole], rest) if len(part)]
    rows, places = _sum_rows([part.view(torch.int64).view(-1, _ROW_WORDS) for part in parts])
    by_row = int(torch.arange(len(rows), device=data.device).mul_(rows).sum())
    by_place = int(torch.arange(1, _ROW_WORDS + 1, device=data.device).mul_(places).sum())
    moved = start // 8 * int(places.sum())
    total = (_ROW_WORDS * by_row + by_place + moved) * _MULTIPLIER + int(places[1::2].sum())
    return (total + count * _LENGTH_FACTOR) & CHECKSUM_MASK


def _sum_rows(parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum of each row, and of each place over all rows, as wrapping int64."""
    device = parts[0].device
    size = _CHUNK_ROWS if device.type == "cpu" else _DEVICE_CHUNK_ROWS
    chunks = [chunk for part in parts for chunk in part.split(size)]
    places = torch.zeros(_ROW_WORDS, dtype=torch.int64, device=device)
    for chunk in chunks:
        places += chunk.sum(0)
    return torch.cat([chunk.sum(1) for chunk in chunks]), places
