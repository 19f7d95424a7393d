"""How far the journal has come, in a small file beside it: `journal.mark`.

SQLite's write-ahead log ends at the first frame that is not whole, so damage there takes every
later transaction away without a word. The mark says which transaction was the last: it is written
and fsynced after each commit and before anybody is told of it. A journal may be one commit ahead of
its mark (a kill came in between), never behind it.

    slot 0: {"position": {...}, "sha256": "..."}     even commits
    slot 1: {"position": {...}, "sha256": "..."}     odd commits

The slots take turns, so that a torn write leaves the one before it, and so that the one write
of a learner that was asleep while another took over is not taken for the newest.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.learner.checkpoints.durable_files import sync_path, write_durably

FILE_NAME = "journal.mark"
# No block of a disk holds parts of both.
_SLOT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Position:
    """One state of a journal: what it holds, and the commits that led there."""

    # Made up when the journal was.
    journal: str
    commits: int
    # Digest of this commit's state and of all before it.
    chain: str
    run_epoch: int = 0
    # The newest step that is planned or saved, and the tries that were acknowledged.
    step: int = 0
    acknowledged: int = 0


class Mark:
    """The mark of one journal. Blocks: used by the thread that writes the journal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    def read(self) -> Position | None:
        """The newest position that was noted whole; None when there is none."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        slots = (_decode(data[at : at + _SLOT_BYTES]) for at in (0, _SLOT_BYTES))
        return max((p for p in slots if p), key=lambda p: p.commits, default=None)

    def begin(self, position: Position) -> None:
        """Have a new file in place of whatever is there."""
        self.close()
        slots = [_encode(position) if at == position.commits % 2 else b"" for at in (0, 1)]
        partial = self.path.with_name(f"{self.path.name}.partial")
        write_durably(partial, b"".join(slot.ljust(_SLOT_BYTES) for slot in slots))
        os.replace(partial, self.path)
        sync_path(self.path.parent)

    def note(self, position: Position) -> None:
        """Note a commit; it is on the disk when this returns."""
        if self._handle is None:
            self._handle = os.open(self.path, os.O_WRONLY)
        slot = _encode(position).ljust(_SLOT_BYTES)
        os.pwrite(self._handle, slot, position.commits % 2 * _SLOT_BYTES)
        os.fdatasync(self._handle)

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


def _encode(position: Position) -> bytes:
    fields = asdict(position)
    return json.dumps({"position": fields, "sha256": _digest(fields)}, sort_keys=True).encode()


def _decode(slot: bytes) -> Position | None:
    try:
        found = json.loads(slot)
        if found["sha256"] == _digest(found["position"]):
            return Position(**found["position"])
    except (ValueError, KeyError, TypeError):
        # Torn, damaged, or never written.
        return None
    return None


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
