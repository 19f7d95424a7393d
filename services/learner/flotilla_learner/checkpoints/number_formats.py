"""Conversion between floating-point numbers of safetensors files and numpy's float32."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

# Dtypes that a policy may be served in, with their names in safetensors.
SERVED_DTYPES: Mapping[str, str] = {"float32": "F32", "bfloat16": "BF16"}


def decode_numbers(data: bytes, kind: str) -> NDArray[np.float32]:
    """Decode numbers of a floating-point format. Raises KeyError for any other."""
    if kind == "BF16":
        return (np.frombuffer(data, "<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
    plain = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[kind]
    return np.frombuffer(data, plain).astype(np.float32)


def encode_numbers(values: NDArray[np.float32], kind: str) -> bytes:
    """Encode numbers in a format that policies are served in, rounded once."""
    return to_bfloat16(values).tobytes() if kind == "BF16" else values.astype("<f4").tobytes()


def round_numbers(values: NDArray[np.float32], kind: str) -> NDArray[np.float32]:
    """Return the numbers as rounded by that format."""
    return decode_numbers(encode_numbers(values, kind), kind)


def to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16. Ties round to even, as in torch; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(
        16
    )
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype("<u2")
