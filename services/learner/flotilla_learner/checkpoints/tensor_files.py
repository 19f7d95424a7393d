"""Headers of safetensors files, written, or read and checked before any data is touched.

A file is: the header's length (8 bytes, little-endian), the header (JSON: name to dtype, shape
and the [begin, end) of its data), the data. The format allows neither gaps nor overlaps."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Same limit as in safetensors: anything longer is an attack, or not such a file.
MAX_HEADER_BYTES = 100_000_000
ITEM_BYTES: Mapping[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
_LENGTH_BYTES = 8
_METADATA = "__metadata__"


class TensorFileError(ValueError):
    """A file cannot be used; the message names it and the problem."""


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """One tensor: `begin` and `end` count bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, TensorSpan]:
    """Return the tensors of a file, in the order of their data. Raises TensorFileError.

    Only the header is read, and only if its length is plausible."""
    header, base, size = _read_json_header(path)
    named = [(n, _parse_span(path, n, e, base)) for n, e in header.items() if n != _METADATA]
    spans = dict(sorted(named, key=lambda item: (item[1].begin, item[1].end)))
    _check_layout(path, spans, base, size)
    return spans


def read_metadata(path: Path) -> Mapping[str, Any]:
    """Return the text metadata of a file's header. Raises TensorFileError."""
    header, _, _ = _read_json_header(path)
    found = header.get(_METADATA, {})
    if not isinstance(found, dict):
        raise TensorFileError(f"{path}: not safetensors: its {_METADATA} is not a JSON object")
    return found


def _read_json_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """Return a file's header, the start of its data, and its size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
                raise TensorFileError(
                    f"{path}: not safetensors: its header claims {length} bytes; the file has"
                    f" {size}, and {MAX_HEADER_BYTES} are allowed"
                )
            header: Any = json.loads(file.read(length))
    except OSError as error:
        raise TensorFileError(f"{path} cannot be read: {error}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise TensorFileError(
            f"{path}: not safetensors: its header is not JSON: {error}"
        ) from error
    if not isinstance(header, dict):
        raise TensorFileError(f"{path}: not safetensors: its header is not a JSON object")
    return header, _LENGTH_BYTES + length, size


def encode_header(
    tensors: Iterable[tuple[str, str, Sequence[int]]], alignment: int = _LENGTH_BYTES
) -> bytes:
    """Return the start of a file up to its data, for (name, dtype, shape) in order of data.

    Data starts at a multiple of `alignment` bytes: the format allows trailing spaces."""
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    at = 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % alignment)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def check_dtype(path: Path, dtype: str) -> None:
    """Raise TensorFileError if a floating-point tensor has another dtype than `dtype` ("F32")."""
    for name, span in read_header(path).items():
        if "F" in span.dtype and span.dtype != dtype:
            raise TensorFileError(f"{path}: {name} is {span.dtype}, expected {dtype}")


def _parse_span(path: Path, name: str, entry: Any, base: int) -> TensorSpan:
    try:
        dtype, (begin, end) = entry["dtype"], entry["data_offsets"]
        shape = tuple(entry["shape"])
        whole = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError) as error:
        raise TensorFileError(f"{path}: {name}: not an entry of a header: {error!r}") from error
    if dtype not in ITEM_BYTES or not whole:
        raise TensorFileError(f"{path}: {name}: dtype {dtype!r}, shape {shape}, offsets are wrong")
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise TensorFileError(
            f"{path}: {name} has {end - begin} bytes, but {dtype} of shape {list(shape)} has"
            f" {math.prod(shape) * ITEM_BYTES[dtype]}"
        )
    return TensorSpan(dtype, shape, base + begin, base + end)


def _check_layout(path: Path, spans: Mapping[str, TensorSpan], base: int, size: int) -> None:
    at = base
    for name, span in spans.items():
        if span.begin != at:
            what = "overlaps the tensor before it" if span.begin < at else "leaves a gap before it"
            raise TensorFileError(f"{path}: {name} {what}")
        at = span.end
    if at != size:
        raise TensorFileError(f"{path}: its tensors end at byte {at}, the file at {size}")
