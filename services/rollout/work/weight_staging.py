"""Staging of announced weights: a copy in a file of our own, with every byte checked before use."""

import asyncio
import shutil
from contextlib import aclosing
from pathlib import Path

import numpy as np

from services.common.fingerprint import checksum64, compute_fingerprint
from services.rollout.ports import PolicyFeed, TransportFailed
from services.rollout.types import Publication

# The dtypes of a WeightManifest, in torch's words.
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
}
# A stream that broke is resumed; one that brings nothing so often is given up.
FRUITLESS_FETCHES = 5
FETCH_PAUSE_S = 0.2


class FingerprintMismatch(Exception):
    """The bytes are not those that the manifest names."""


async def stage_weights(publication: Publication, feed: PolicyFeed, path: Path) -> None:
    """Copy the publication to `path` and verify it there.

    A copy, because the publisher writes its slots anew while we load. Raises TransportFailed or
    FingerprintMismatch.
    """
    try:
        async with asyncio.timeout(publication.timeout_s):
            if publication.transport == "grpc":
                await _fetch_weights(publication, feed, path)
            else:
                await asyncio.to_thread(shutil.copyfile, publication.location, path)
    except TimeoutError as error:
        raise TransportFailed(f"not there after {publication.timeout_s:.0f} s") from error
    except OSError as error:
        raise TransportFailed(f"{publication.location}: {error.strerror or error}") from error
    await asyncio.to_thread(verify_weights, publication, path)


async def _fetch_weights(publication: Publication, feed: PolicyFeed, path: Path) -> None:
    fruitless = 0
    with path.open("wb") as file:
        while file.tell() < publication.total_bytes:
            before = file.tell()
            try:
                async with aclosing(feed.fetch_weights(publication, before)) as chunks:
                    async for chunk in chunks:
                        file.write(chunk)
            except TransportFailed:
                if fruitless + 1 >= FRUITLESS_FETCHES:
                    raise
            fruitless = 0 if file.tell() > before else fruitless + 1
            if fruitless >= FRUITLESS_FETCHES:
                raise TransportFailed(f"the stream ends at byte {file.tell()}")
            if fruitless:
                await asyncio.sleep(FETCH_PAUSE_S)


def verify_weights(publication: Publication, path: Path) -> None:
    """Check length, every tensor and the fingerprint. Raises FingerprintMismatch."""
    entries = publication.manifest
    if compute_fingerprint(entries, publication.total_bytes) != publication.policy.fingerprint:
        raise FingerprintMismatch("the manifest does not have the policy's fingerprint")
    size = path.stat().st_size
    if size < publication.total_bytes:
        raise FingerprintMismatch(f"{size} bytes, the manifest names {publication.total_bytes}")
    data = np.memmap(path, dtype=np.uint8, mode="r")
    for entry in entries:
        if entry.dtype not in ITEM_BYTES:
            raise FingerprintMismatch(f"tensor {entry.name} is of unknown dtype {entry.dtype!r}")
        length = int(np.prod(entry.shape, dtype=np.int64)) * ITEM_BYTES[entry.dtype]
        end = entry.offset_bytes + length
        if checksum64(data[entry.offset_bytes : end]) != entry.checksum:
            raise FingerprintMismatch(f"tensor {entry.name} differs from its checksum")
