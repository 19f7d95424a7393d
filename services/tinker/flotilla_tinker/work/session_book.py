"""Sessions of clients, which end when no heartbeat comes."""

import json
import sqlite3
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from flotilla_tinker.store import record_rows
from flotilla_tinker.store.record_rows import SessionRow
from flotilla_tinker.store.store import Store
from flotilla_tinker.work.desk_errors import GoneError, NotFound


@dataclass(slots=True)
class _Session:
    tenant: str
    # In ticks.
    seen_s: float


class SessionBook:
    """Open sessions and when each was last heard of.

    `ticks` are seconds that stand still while the machine sleeps: a laptop that wakes up finds its
    sessions as they were."""

    def __init__(
        self, store: Store, clock: Callable[[], float], ticks: Callable[[], float]
    ) -> None:
        self._store = store
        self._clock = clock
        self._ticks = ticks
        self._open: dict[str, _Session] = {}

    async def load(self) -> None:
        """Take up the open sessions of the journal: their clients may still be there."""
        for row in await self._store.run(record_rows.open_sessions):
            self._open[row.session_id] = _Session(row.tenant, self._ticks())

    async def open_session(self, tenant: str, facts: Mapping[str, Any]) -> str:
        row = SessionRow(uuid.uuid4().hex, tenant, self._clock())
        text = json.dumps(dict(facts))
        await self._store.run(lambda db: record_rows.add_session(db, row, text))
        self._open[row.session_id] = _Session(tenant, self._ticks())
        return row.session_id

    async def touch(self, tenant: str, session_id: str) -> None:
        """Note a sign of life. Raises GoneError for an ended session, NotFound for none."""
        session = self._open.get(session_id)
        if session is not None and session.tenant == tenant:
            session.seen_s = self._ticks()
            return
        found = await self._store.run(partial(_find_session, session_id))
        if found is None or found[0] != tenant:
            raise NotFound(f"there is no session {session_id!r}: create one")
        raise GoneError(f"the session {session_id} has ended: create another")

    def stale(self, limit_s: float) -> list[str]:
        """Return the sessions that nobody has been heard of for this long, the longest first."""
        since = self._ticks() - limit_s
        silent = [(each.seen_s, key) for key, each in self._open.items() if each.seen_s < since]
        return [key for _, key in sorted(silent)]

    def is_open(self, session_id: str) -> bool:
        """Return whether it is open; samples of no session have none that could end."""
        return not session_id or session_id in self._open

    def forget(self, session_id: str) -> None:
        self._open.pop(session_id, None)


def _find_session(session_id: str, db: sqlite3.Connection) -> tuple[str, float | None] | None:
    return record_rows.find_session(db, session_id)
