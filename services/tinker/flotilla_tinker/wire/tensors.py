"""Arrays of the wire as numpy's, and back."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla.tinker.v1 import tinker_wire_pb2 as pb
from flotilla_tinker.wire.wire_error import WireError

_TYPES = {
    pb.ARRAY_TYPE_FLOAT32: np.dtype("<f4"),
    pb.ARRAY_TYPE_INT64: np.dtype("<i8"),
    pb.ARRAY_TYPE_INT32: np.dtype("<i4"),
}
_INDEX = np.dtype("<i8")
# Of one request: sparse rows of a few bytes may stand for any number.
_MOST_VALUES = 2**25
_MOST_DIMENSIONS = 2


def check_sizes(tensors: Iterable[pb.Tensor]) -> None:
    """Raise WireError if arrays would take too much memory together."""
    if sum(max(0, math.prod(tensor.shape)) for tensor in tensors) > _MOST_VALUES:
        raise WireError(f"the arrays hold more than {_MOST_VALUES} values: send fewer at a time")


def read_tensor(tensor: pb.Tensor, where: str) -> NDArray[Any]:
    """Return a tensor's values, sparse ones as a whole array. Raises WireError."""
    kind = _TYPES.get(tensor.dtype)
    if kind is None:
        raise WireError(f"{where}: its dtype is {tensor.dtype}; send float32 (1) or int64 (2)")
    shape = tuple(tensor.shape)
    if len(shape) > _MOST_DIMENSIONS:
        raise WireError(f"{where}: it has {len(shape)} dimensions; no loss takes more than 2")
    # Next to a 0 too: numpy refuses such sizes although there is no value.
    if any(not 0 <= size <= _MOST_VALUES for size in shape):
        raise WireError(f"{where}: its shape is {list(shape)}")
    if tensor.WhichOneof("encoding") == "sparse_csr":
        return _fill_rows(tensor.sparse_csr, kind, shape, where)
    values = _read_array(tensor.dense, kind, where)
    if shape and math.prod(shape) != len(values):
        raise WireError(f"{where}: {len(values)} values do not fit the shape {list(shape)}")
    return values.reshape(shape or (len(values),))


def read_tokens(tokens: bytes, where: str) -> NDArray[np.int32]:
    """Return token ids. Raises WireError."""
    return _read_array(tokens, np.dtype("<i4"), where)


def _fill_rows(
    sparse: pb.SparseRows, kind: "np.dtype[Any]", shape: Sequence[int], where: str
) -> NDArray[Any]:
    values = _read_array(sparse.values, kind, where)
    starts = _read_array(sparse.crow_indices, _INDEX, where)
    columns = _read_array(sparse.col_indices, _INDEX, where)
    fits = len(shape) == 2 and len(starts) == shape[0] + 1 and len(columns) == len(values)
    counts = np.diff(starts)
    if (
        not fits
        or (starts[0], starts[-1]) != (0, len(values))
        or (counts < 0).any()
        or ((columns < 0) | (columns >= shape[1])).any()
    ):
        raise WireError(f"{where}: its sparse rows do not fit the shape {list(shape)}")
    whole = np.zeros(shape, kind)
    whole[np.repeat(np.arange(shape[0]), counts), columns] = values
    return whole


def _read_array(data: bytes, kind: "np.dtype[Any]", where: str) -> NDArray[Any]:
    if len(data) % kind.itemsize:
        raise WireError(f"{where}: {len(data)} bytes are no whole number of {kind.name} values")
    return np.frombuffer(data, kind)


def write_array(values: NDArray[Any], kind: str) -> bytes:
    """Return the values as bytes of this numpy type."""
    return np.ascontiguousarray(values, kind).tobytes()


def batch_arrays(arrays: Sequence[NDArray[np.float32]]) -> pb.BatchedTensor:
    """Return arrays of the same trailing shape, one after another."""
    sizes = [array.size * 4 for array in arrays]
    return pb.BatchedTensor(
        data=b"".join(write_array(array, "<f4") for array in arrays),
        offsets=write_array(np.cumsum([0, *sizes]), "<i8"),
        dtype=pb.ARRAY_TYPE_FLOAT32,
        trailing_shape=arrays[0].shape[1:],
    )
