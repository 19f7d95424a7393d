"""Staging of announced weights: a private copy in a file, with every byte checked before use."""

import asyncio
import shutil
from contextlib import aclosing
from pathlib import Path

import numpy as np

from flotilla_common.domain.policy import PolicyId
from flotilla_common.telemetry import metrics
from flotilla_common.telemetry.log import get_logger
from flotilla_common.weights.fingerprint import ITEM_BYTES, checksum64, compute_fingerprint
from flotilla_common.weights.weight_delta import BLOCK_BYTES, DamagedDeltaError, apply_change
from flotilla_rollout.ports import PolicyFeed, TransportFailed
from flotilla_rollout.types import FetchedPart, Publication

# A broken stream is resumed; after so many attempts without a byte it is given up.
FRUITLESS_FETCHES = 5
FETCH_PAUSE_S = 0.2

log = get_logger(__name__)
_fetches = metrics.event_counter(
    "flotilla_weight_fetches",
    "Publications fetched as a whole or as a difference, and differences that failed",
    "how",
)


class FingerprintMismatch(Exception):
    """The bytes do not match the manifest."""


class KeptWeights:
    """The bytes of the served publication, from which the next may differ only a little."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Their policy; None without kept bytes.
        self.policy: PolicyId | None = None

    def replace_by(self, publication: Publication, staged: Path) -> None:
        """Keep the staged bytes of the served publication, if it should be kept."""
        if publication.keep and staged.exists():
            staged.replace(self.path)
            self.policy = publication.policy
        elif publication.policy != self.policy:
            self.forget()

    def forget(self) -> None:
        """Drop the kept bytes."""
        self.policy = None
        self.path.unlink(missing_ok=True)


async def stage_weights(
    publication: Publication, feed: PolicyFeed, path: Path, kept: KeptWeights | None = None
) -> None:
    """Copy the publication to `path`, using kept bytes of another if there are any, and verify it.

    A copy, because the publisher reuses its slots while we load. Raises TransportFailed or
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
    """Fetch a publication; fetch it as a whole if the result of differences is wrong."""
    # Weights that the learner does not trust must not be a base.
    if kept is not None and kept.policy is not None and not publication.reload:
        try:
            changed = await _fetch_weights(publication, feed, path, kept)
            await asyncio.to_thread(verify_weights, publication, path)
        # Perhaps there is no room for both: the whole may fit once the kept bytes are gone.
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
    """Return the bytes of a part of the publication. Raises DamagedDeltaError."""
    if not part.delta_bytes:
        return part.data
    if kept is None:
        raise DamagedDeltaError("a difference that was not requested")
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
        end = entry.offset_bytes + entry.size_bytes
        if checksum64(data[entry.offset_bytes : end]) != entry.checksum:
            raise FingerprintMismatch(f"tensor {entry.name} differs from its checksum")
