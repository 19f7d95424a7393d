"""Port for uploads of checkpoints; by itself that of a run without uploads."""

import asyncio

from flotilla_learner.journal.schema import CheckpointRow


class CheckpointUploads:
    """Uploads of one learner's checkpoints to the store of its run. By default there is no store:
    checkpoints stay in the run's folder, and a takeover cannot be detected."""

    async def offer(self, row: CheckpointRow) -> None:
        """Queue a committed checkpoint for upload; return once its files are held."""

    async def wait_until_fenced(self) -> None:
        """Wait until a later epoch takes over the run; then raise FencedError."""
        await asyncio.Event().wait()

    async def finish(self, timeout_s: float) -> None:
        """Wait until the newest checkpoint is in the store. Raises UploadError, FencedError."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics of uploads since the last call: `timing/upload` and the bytes."""
        return {}

    def close(self) -> None:
        """End the uploads soon. One in progress stays unfinished, and so without a manifest."""
