"""Deleting goes on until it is done, and no longer than it can succeed."""

import sqlite3
import time

import pytest

from services.env_gateway import closing
from services.env_gateway.adapters.fake import FakeBackend
from services.env_gateway.journal import Journal
from services.env_gateway.ports import BackendError
from tests.env_gateway.support import opened, running, until


async def test_a_pause_of_a_day_that_a_server_asks_for_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(closing, "_LONGEST_S", 0.05)
    backend = FakeBackend()
    later = BackendError("throttled", "later", delivered=False, retry_after_s=86_400.0)
    backend.fail("close", later)
    async with running(backend) as gateway:
        session = await opened(gateway)
        gateway.close(session.episode.episode_id)
        await until(lambda: not backend.running)


async def test_a_drain_does_not_wait_for_what_is_refused_for_good() -> None:
    backend = FakeBackend()
    refused = BackendError("auth", "wrong key", delivered=False, invalid=True)
    backend.fail("close", *[refused] * 100)
    async with running(backend, close_timeout_s=30.0) as gateway:
        session = await opened(gateway)
        started = time.monotonic()
        gateway.close(session.episode.episode_id)
        await gateway.drain(0.0)
        assert time.monotonic() - started < 5.0
    assert backend.steps["close"] >= 1


async def test_a_refusal_in_passing_does_not_leave_an_instance_running() -> None:
    backend = FakeBackend()
    backend.fail("close", BackendError("http", "a 400 of a proxy", delivered=False, invalid=True))
    async with running(backend) as gateway:
        session = await opened(gateway)
        gateway.close(session.episode.episode_id)
        await until(lambda: not backend.running)


async def test_a_journal_that_cannot_be_written_takes_no_place_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = FakeBackend()
    async with running(backend, limits={"max_episodes": 1}) as gateway:
        session = await opened(gateway)
        forget, failures = Journal.deleted, [sqlite3.OperationalError("disk is full")]

        def deleted(journal: Journal, episode_id: str) -> None:
            if failures:
                raise failures.pop()
            forget(journal, episode_id)

        monkeypatch.setattr(Journal, "deleted", deleted)
        gateway.close(session.episode.episode_id)
        await until(lambda: not gateway.admission.held)
