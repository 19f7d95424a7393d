"""Port for uploads of checkpoints, and its implementation for a run without uploads."""

import asyncio
from typing import Protocol

from services.learner.journal.schema import CheckpointRow


class CheckpointUploads(Protocol):
    """Uploads of one learner's checkpoints to the store of its run."""

    async def offer(self, row: CheckpointRow) -> None:
        """Queue a committed checkpoint for upload; return once its files are held."""
        ...

    async def wait_until_fenced(self) -> None:
        """Wait until a later epoch takes over the run; then raise FencedError."""
        ...

    async def finish(self, timeout_s: float) -> None:
        """Wait until the newest checkpoint is in the store. Raises UploadError, FencedError."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return the metrics of uploads since the last call: `timing/upload` and the bytes."""
        ...

    def close(self) -> None:
        """End the uploads soon. One in progress stays unfinished, and so without a manifest."""
        ...


class NoUploads:
    """Uploads of a run whose checkpoints stay in its folder. Implements
    `CheckpointUploads`."""

    async def offer(self, row: CheckpointRow) -> None:
        """Ignore the checkpoint: there is no store."""

    async def wait_until_fenced(self) -> None:
        """Wait forever: without a store, a takeover cannot be detected."""
        await asyncio.Event().wait()

    async def finish(self, timeout_s: float) -> None:
        """Return at once: no upload is in progress."""

    def metrics(self) -> dict[str, float]:
        """Return no metrics."""
        return {}

    def close(self) -> None:
        """Do nothing: no resources are held."""
