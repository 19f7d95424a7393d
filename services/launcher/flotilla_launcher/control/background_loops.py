"""Recurring background work of the launcher."""

from collections.abc import Awaitable, Callable

from flotilla_common.telemetry import log

_log = log.get_logger(__name__)


async def run_safely(turn: Callable[[], Awaitable[object]], what: str) -> None:
    """Run one turn and log any failure: a temporary one, such as a full disk, must not end
    later turns."""
    try:
        await turn()
    # Any failure is logged; the next turn may succeed.
    except Exception:  # noqa: BLE001
        _log.exception("a turn failed", what=what)
