"""Recurring background work, for as long as the launcher lives."""

from collections.abc import Awaitable, Callable

from services.common import log

_log = log.get_logger(__name__)


async def run_safely(turn: Callable[[], Awaitable[object]], what: str) -> None:
    """Run one turn and log any failure. A disk that is full for a moment must not end all
    later turns."""
    try:
        await turn()
    # Whatever it is, it is logged, and the next turn may be better.
    except Exception:  # noqa: BLE001
        _log.exception("a turn failed", what=what)
