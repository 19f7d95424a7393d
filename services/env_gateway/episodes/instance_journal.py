"""Which instances exist or may exist, on disk, so that a restarted gateway can close them.

A row is written before the instance is asked for and removed once it is deleted. What a process
that was killed leaves in the file is therefore everything that may still be running.
"""

import sqlite3
from pathlib import Path

from services.env_gateway.ports import Orphan

_SCHEMA = """
CREATE TABLE IF NOT EXISTS instances (
    episode_id TEXT PRIMARY KEY,
    backend TEXT NOT NULL,
    instance_id TEXT
) WITHOUT ROWID
"""


class Journal:
    """Not for use from several threads. WAL without an fsync per row: it outlives the process;
    what a power cut takes with it, the instances' own time to live cleans up."""

    def __init__(self, path: Path | None) -> None:
        """`path` None keeps the journal in memory, for tests."""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path or ":memory:", isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute(_SCHEMA)

    def creating(self, episode_id: str, *, backend: str) -> None:
        self._db.execute(
            "INSERT INTO instances (episode_id, backend) VALUES (?, ?)", (episode_id, backend)
        )

    def created(self, episode_id: str, instance_id: str) -> None:
        self._db.execute(
            "UPDATE instances SET instance_id = ? WHERE episode_id = ?", (instance_id, episode_id)
        )

    def deleted(self, episode_id: str) -> None:
        self._db.execute("DELETE FROM instances WHERE episode_id = ?", (episode_id,))

    def orphans(self) -> dict[str, list[Orphan]]:
        """What is on record, by backend."""
        result: dict[str, list[Orphan]] = {}
        rows = self._db.execute("SELECT backend, episode_id, instance_id FROM instances")
        for backend, episode_id, instance_id in rows:
            result.setdefault(backend, []).append(Orphan(episode_id, instance_id))
        return result

    def close(self) -> None:
        self._db.close()
