"""Staging of announced weights: a copy in a file of our own, with every byte checked before use."""

import asyncio
import shutil
from contextlib import aclosing
from pathlib import Path

import numpy as np

from services.common import metrics
from services.common.domain.policy import PolicyId
from services.common.fingerprint import checksum64, compute_fingerprint
from services.common.log import get_logger
from services.common.weight_delta import (
    BLOCK_BYTES,
    DamagedDeltaError,
    apply_change,
)
from services.rollout.ports import PolicyFeed, TransportFailed
from services.rollout.types import FetchedPart, Publication

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

log = get_logger(__name__)
_fetches = metrics.event_counter(
    "flotilla_weight_fetches",
    "Publications fetched as a whole or as a difference, and differences that failed",
    "how",
)


class FingerprintMismatch(Exception):
    """The bytes are not those that the manifest names."""


class KeptWeights:
    """The bytes of the publication that is served, from which the next may differ in little."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Whose they are; None while there are none.
        self.policy: PolicyId | None = None

    def replace_by(self, publication: Publication, staged: Path) -> None:
        """Keep what is staged of a publication that is served by now, if it is to be kept."""
        if publication.keep and staged.exists():
            staged.replace(self.path)
            self.policy = publication.policy
        elif publication.policy != self.policy:
            self.forget()

    def forget(self) -> None:
        """Keep nothing any more."""
        self.policy = None
        self.path.unlink(missing_ok=True)


async def stage_weights(
    publication: Publication, feed: PolicyFeed, path: Path, kept: KeptWeights | None = None
) -> None:
    """Copy the publication to `path` and verify it there, by what is kept of another, if it is.

    A copy, because the publisher writes its slots anew while we load. Raises TransportFailed or
    FingerprintMismatch.
    """
    try:
        async with asyncio.timeout(publication.timeout_s):
            if publication.transport == "grpc":
                await _fetch_verified(publication, feed, path, kept)
            else:
                await asyncio.to_thread(shutil.copyfile, publication.location, path)
                await asyncio.to_thread(verify_weights, publication, path)
    except TimeoutError as error:
        raise TransportFailed(f"not there after {publication.timeout_s:.0f} s") from error
    except OSError as error:
        raise TransportFailed(f"{publication.location}: {error.strerror or error}") from error


async def _fetch_verified(
    publication: Publication, feed: PolicyFeed, path: Path, kept: KeptWeights | None
) -> None:
    """Fetch a publication; all of it where what comes of differences is not what it should be."""
    # What the learner does not trust is no ground to build on.
    if kept is not None and kept.policy is not None and not publication.reload:
        try:
            changed = await _fetch_weights(publication, feed, path, kept)
            await asyncio.to_thread(verify_weights, publication, path)
        # No room for both, perhaps: all of it may have, once what is kept is gone.
        except (DamagedDeltaError, FingerprintMismatch, OSError) as error:
            _fetches("failed")()
            log.warning("fetched as a whole", policy=publication.policy.label, reason=str(error))
        else:
            _fetches("delta" if changed else "whole")()
            return
    if kept is not None:
        kept.forget()
    await _fetch_weights(publication, feed, path, None)
    await asyncio.to_thread(verify_weights, publication, path)
    _fetches("whole")()


async def _fetch_weights(
    publication: Publication, feed: PolicyFeed, path: Path, kept: KeptWeights | None
) -> bool:
    """Write a publication to `path`; return True if some of it came as differences.

    Raises TransportFailed and DamagedDeltaError."""
    fruitless, changed = 0, False
    held = kept.policy if kept is not None else None
    with path.open("wb") as file:
        while file.tell() < publication.total_bytes:
            before = file.tell()
            try:
                async with aclosing(feed.fetch_weights(publication, before, held)) as parts:
                    async for part in parts:
                        changed |= part.delta_bytes > 0
                        file.write(await _part_bytes(part, kept, file.tell()))
            except TransportFailed:
                if fruitless + 1 >= FRUITLESS_FETCHES:
                    raise
            fruitless = 0 if file.tell() > before else fruitless + 1
            if fruitless >= FRUITLESS_FETCHES:
                raise TransportFailed(f"the stream ends at byte {file.tell()}")
            if fruitless:
                await asyncio.sleep(FETCH_PAUSE_S)
    return changed


async def _part_bytes(
    part: FetchedPart, kept: KeptWeights | None, offset: int
) -> bytes | memoryview:
    """Return a part's bytes of the publication. Raises DamagedDeltaError."""
    if not part.delta_bytes:
        return part.data
    if kept is None:
        raise DamagedDeltaError("a difference that was not asked for")
    return await asyncio.to_thread(_apply_delta, part, kept.path, offset)


def _apply_delta(part: FetchedPart, kept: Path, offset: int) -> bytes | memoryview:
    if not 0 < part.delta_bytes <= BLOCK_BYTES:
        raise DamagedDeltaError(f"a difference of {part.delta_bytes} bytes")
    old = np.fromfile(kept, np.uint8, part.delta_bytes, offset=offset)
    if old.size != part.delta_bytes:
        raise DamagedDeltaError(f"a difference beyond byte {offset + old.size}")
    return apply_change(old, part.data).data


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
