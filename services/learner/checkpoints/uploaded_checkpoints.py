"""Checkpoints in a run's folder that are queued for upload after their commit."""

from pathlib import Path

from services.learner.checkpoints.checkpoint_folders import Checkpoints
from services.learner.checkpoints.uploads import CheckpointUploads
from services.learner.journal.schema import CheckpointRow
from services.learner.journal.store import Journal


class UploadedCheckpoints(Checkpoints):
    """Checkpoints that are uploaded after their commit."""

    def __init__(
        self,
        uploads: CheckpointUploads,
        run_dir: Path,
        journal: Journal,
        *,
        run_id: str,
        run_epoch: int,
        keep: int,
    ) -> None:
        super().__init__(run_dir, journal, run_id=run_id, run_epoch=run_epoch, keep=keep)
        self._uploads = uploads

    def metrics(self) -> dict[str, float]:
        """Return the metrics of checkpoints and uploads that ended since the last call."""
        return {**super().metrics(), **self._uploads.metrics()}

    async def _take_note(self, row: CheckpointRow) -> None:
        """Queue the upload."""
        await self._uploads.offer(row)

    async def find_newest(self) -> CheckpointRow | None:
        """Find the newest checkpoint like the base class, and queue it, since the end of the last
        start may have cut off its upload."""
        row = await super().find_newest()
        if row is not None:
            await self._uploads.offer(row)
        return row
