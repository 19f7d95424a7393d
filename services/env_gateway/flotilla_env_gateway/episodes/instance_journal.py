"""Journal on disk of the instances that exist or may exist, so that a restarted gateway can
delete them.

A row is written before an instance is requested and removed after its deletion. The rows
that a killed process leaves are therefore everything that may still be running."""

import sqlite3
from pathlib import Path

from flotilla_env_gateway.ports import Orphan

_SCHEMA = """
CREATE TABLE IF NOT EXISTS instances (
    episode_id TEXT PRIMARY KEY,
    backend TEXT NOT NULL,
    instance_id TEXT
) WITHOUT ROWID
"""


class InstanceJournal:
    """SQLite journal of instances; not thread-safe. It uses WAL without an fsync per row, so
    it survives the process. Rows lost in a power cut are covered by the instances' own time
    to live."""

    def __init__(self, path: Path | None) -> None:
        """Open the journal at `path`; None keeps it in memory, for tests."""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path or ":memory:", isolation_level=None)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute(_SCHEMA)

    def record_creating(self, episode_id: str, *, backend: str) -> None:
        self._db.execute(
            "INSERT INTO instances (episode_id, backend) VALUES (?, ?)", (episode_id, backend)
        )

    def record_created(self, episode_id: str, instance_id: str) -> None:
        self._db.execute(
            "UPDATE instances SET instance_id = ? WHERE episode_id = ?", (instance_id, episode_id)
        )

    def record_deleted(self, episode_id: str) -> None:
        self._db.execute("DELETE FROM instances WHERE episode_id = ?", (episode_id,))

    def list_orphans(self) -> dict[str, list[Orphan]]:
        """Return the recorded instances by backend."""
        result: dict[str, list[Orphan]] = {}
        rows = self._db.execute("SELECT backend, episode_id, instance_id FROM instances")
        for backend, episode_id, instance_id in rows:
            result.setdefault(backend, []).append(Orphan(episode_id, instance_id))
        return result

    def close(self) -> None:
        self._db.close()
