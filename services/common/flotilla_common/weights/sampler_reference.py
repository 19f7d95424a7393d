"""Publications of a policy whose weights stay with a Tinker service: a file with their address.

They are announced, fetched, checked and fingerprinted like weights, so that everything between
learner and engine is the same; the fingerprint is that of the address."""

from pathlib import Path

import numpy as np

from flotilla_common.files.durable_files import replace_file
from flotilla_common.weights.fingerprint import TensorEntry, checksum64

_NAME = "tinker_path"
_SCHEME = "tinker://"


class ReferenceFileError(Exception):
    """A publication holds no address of weights at a Tinker service."""


def write_reference(path: Path, address: str) -> tuple[TensorEntry, ...]:
    """Write the address of saved weights, `tinker://...`; return the file's manifest."""
    data = address.encode()
    replace_file(path, data)
    sum64 = checksum64(np.frombuffer(data, np.uint8))
    return (TensorEntry(_NAME, "uint8", (len(data),), 0, sum64),)


def read_reference(path: Path) -> str:
    """Return the address that `write_reference` wrote. Raises ReferenceFileError."""
    data = path.read_bytes()
    address = data.decode(errors="replace")
    if not address.startswith(_SCHEME):
        raise ReferenceFileError(
            'the learner published weights and no address of them: is learner.engine = "tinker"?'
        )
    return address
