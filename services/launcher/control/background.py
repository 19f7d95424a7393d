"""Work that goes on, turn after turn, for as long as the launcher does."""

from collections.abc import Awaitable, Callable

from services.common import log

_log = log.get_logger(__name__)


async def unbroken(turn: Callable[[], Awaitable[object]], what: str) -> None:
    """One turn. A disk that is full for a moment must not end all the turns to come."""
    try:
        await turn()
    # Whatever it is, it is logged, and the next turn may be better.
    except Exception:  # noqa: BLE001
        _log.exception("a turn failed", what=what)
