"""Digests that detect changed records: SQLite's pages carry no checksums.

Each trajectory has two digests: one of its arrays, which may be pruned, computed as for
submissions, and a SHA-256 of everything else, including the digest of the arrays. A plan has one.
Fields that change after the first write (why a trajectory was dropped) are not covered."""

import hashlib
import json
from collections.abc import Iterable

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.run_folder.journal_file import JournalError

# Reason for dropping a group with a damaged record.
CORRUPT = "corrupt_record"


class DamagedRecordError(JournalError):
    """Journaled trajectories differ from what was written; `keys` lists them."""

    def __init__(self, keys: Iterable[AttemptKey]) -> None:
        self.keys = tuple(keys)
        super().__init__(f"the journal holds damaged records: {', '.join(map(str, self.keys))}")


def row_digest(values: Iterable[str | int | float | bytes | None]) -> bytes:
    """Return the digest of one row's columns, in order."""
    plain = [value.hex() if isinstance(value, bytes) else value for value in values]
    return hashlib.sha256(json.dumps(plain).encode()).digest()
