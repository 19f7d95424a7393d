"""Checkpoints in a run's folder whose uploads are begun as they are made."""

from pathlib import Path

from services.learner.checkpoints.checkpoint_folders import Checkpoints
from services.learner.checkpoints.remote import NoUploads
from services.learner.journal.schema import CheckpointRow
from services.learner.journal.store import Journal
from services.learner.ports import Ranks


class UploadedCheckpoints(Checkpoints):
    """Checkpoints of which each is also uploaded, once it is committed."""

    def __init__(
        self,
        uploads: NoUploads,
        run_dir: Path,
        journal: Journal,
        *,
        run_id: str,
        run_epoch: int,
        keep: int,
    ) -> None:
        super().__init__(run_dir, journal, run_id=run_id, run_epoch=run_epoch, keep=keep)
        self._uploads = uploads

    async def save(self, ranks: Ranks, step: int) -> CheckpointRow:
        """As in a folder alone; the upload is only begun."""
        row = await super().save(ranks, step)
        await self._uploads.offer(row)
        return row

    async def newest(self) -> CheckpointRow | None:
        """As in a folder alone; its upload may have been cut off by the end of the last start."""
        row = await super().newest()
        if row is not None:
            await self._uploads.offer(row)
        return row
