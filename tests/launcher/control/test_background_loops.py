"""Turns of a loop that continue whatever the previous turn did."""

import asyncio
import sqlite3
from pathlib import Path

import pytest

from flotilla_launcher.control.background_loops import run_safely
from flotilla_launcher.control.event_publisher import EventPublisher
from flotilla_launcher.state import LEARNER, Run
from flotilla_launcher.store.ledger import Ledger


async def test_notifications_continue_after_a_moment_without_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, reported = Ledger(tmp_path / "launcher.sqlite"), asyncio.Queue[int]()
    with store.transaction():
        store.begin_run(Run("r", "demo", {LEARNER: 1}), "{}", 1.0, {})
        store.add_event("r", 1.0, "message", {"text": "x"})
    query, failures = store.list_unpublished, iter((sqlite3.OperationalError("disk is full"), None))

    def untold() -> dict[str, int]:
        failure = next(failures, None)
        if failure is not None:
            raise failure
        return query()

    monkeypatch.setattr(store, "list_unpublished", untold)

    async def observer(stored: object, event: object) -> None:
        await reported.put(1)

    telling = asyncio.create_task(EventPublisher(store, [observer]).publish_forever())
    assert await asyncio.wait_for(reported.get(), 10) == 1
    telling.cancel()
    await asyncio.gather(telling, return_exceptions=True)
    store.close()


async def test_a_turn_that_is_cancelled_is_the_last() -> None:
    begun = asyncio.Event()

    async def turn() -> None:
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(run_safely(turn, "waiting"))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
