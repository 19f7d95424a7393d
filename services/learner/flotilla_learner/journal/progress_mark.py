"""The journal's progress, in a small file beside it: `journal.mark`.

SQLite's write-ahead log ends at the first incomplete frame, so damage there silently removes
every later transaction. The mark records the last transaction: it is written and fsynced after
each commit and before anything is acknowledged. A journal may be one commit ahead of its mark
(after a kill between the two), never behind it.

    slot 0: {"position": {...}, "sha256": "..."}     even commits
    slot 1: {"position": {...}, "sha256": "..."}     odd commits

The slots alternate, so that a torn write leaves the previous one intact, and so that a single
write by a learner that slept while another took over is not mistaken for the newest."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flotilla_common.files.durable_files import sync_path, write_durably

MARK_FILE = "journal.mark"
# No disk block holds parts of both slots.
_SLOT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Position:
    """One state of a journal: its content, and the commits that led to it."""

    run_id: str
    # Random id, assigned when the journal was created.
    journal: str
    commits: int
    # Digest of this commit's state and all earlier ones.
    chain: str
    run_epoch: int = 0
    # Newest step that is planned or saved, and the number of acknowledged tries.
    step: int = 0
    acknowledged: int = 0


class ProgressMark:
    """Mark of one journal. Blocks: used by the thread that writes the journal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    def read_position(self) -> Position | None:
        """Return the newest intact position; None if there is none."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        slots = (_decode(data[at : at + _SLOT_BYTES]) for at in (0, _SLOT_BYTES))
        return max((p for p in slots if p), key=lambda p: p.commits, default=None)

    def reset_to(self, position: Position) -> None:
        """Replace the file with a new one at `position`."""
        self.close()
        slots = [_encode(position) if at == position.commits % 2 else b"" for at in (0, 1)]
        partial = self.path.with_name(f"{self.path.name}.partial")
        write_durably(partial, b"".join(slot.ljust(_SLOT_BYTES) for slot in slots))
        os.replace(partial, self.path)
        sync_path(self.path.parent)

    def note_commit(self, position: Position) -> None:
        """Record a commit; it is on disk when this returns."""
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
    return json.dumps(
        {"position": fields, "sha256": _fields_digest(fields)}, sort_keys=True
    ).encode()


def _decode(slot: bytes) -> Position | None:
    try:
        found = json.loads(slot)
        if found["sha256"] == _fields_digest(found["position"]):
            return Position(**found["position"])
    except (ValueError, KeyError, TypeError):
        # Torn, damaged, or never written.
        return None
    return None


def _fields_digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
