"""Deletion is retried until it is done, and no longer than it can succeed."""

import asyncio
import sqlite3
import time
from pathlib import Path

import pytest

from flotilla_env_gateway.api.status import list_limiters
from flotilla_env_gateway.episodes import instance_deletion
from flotilla_env_gateway.episodes.instance_journal import InstanceJournal
from flotilla_env_gateway.ports import BackendError
from tests.support.fake_environments import ScriptedBackend
from tests.support.fake_gateway import open_spec, opened, running
from tests.support.waiting import until


async def test_a_pause_of_a_day_that_a_server_requests_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(instance_deletion, "_LONGEST_S", 0.05)
    backend = ScriptedBackend()
    later = BackendError("throttled", "later", delivered=False, retry_after_s=86_400.0)
    backend.fail_at("close", later)
    async with running(backend) as gateway:
        session = await opened(gateway)
        gateway.close(session.episode.episode_id)
        await until(lambda: not backend.running)


async def test_a_drain_does_not_wait_for_what_is_refused_for_good() -> None:
    backend = ScriptedBackend()
    refused = BackendError("auth", "wrong key", delivered=False, invalid=True)
    backend.fail_at("close", *[refused] * 100)
    async with running(backend, close_timeout_s=30.0) as gateway:
        session = await opened(gateway)
        started = time.monotonic()
        gateway.close(session.episode.episode_id)
        await gateway.drain(0.0)
        assert time.monotonic() - started < 20.0
    assert backend.steps["close"] >= 1


async def test_a_refusal_in_passing_does_not_leave_an_instance_running() -> None:
    backend = ScriptedBackend()
    backend.fail_at(
        "close", BackendError("http", "a 400 of a proxy", delivered=False, invalid=True)
    )
    async with running(backend) as gateway:
        session = await opened(gateway)
        gateway.close(session.episode.episode_id)
        await until(lambda: not backend.running)


async def test_a_journal_that_cannot_be_written_takes_no_place_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = ScriptedBackend()
    async with running(backend, limits={"max_episodes": 1}) as gateway:
        session = await opened(gateway)
        forget, failures = (
            InstanceJournal.record_deleted,
            [sqlite3.OperationalError("disk is full")],
        )

        def deleted(journal: InstanceJournal, episode_id: str) -> None:
            if failures:
                raise failures.pop()
            forget(journal, episode_id)

        monkeypatch.setattr(InstanceJournal, "record_deleted", deleted)
        gateway.close(session.episode.episode_id)
        await until(lambda: not gateway.admission.held_places)


class Counted(ScriptedBackend):
    """Notes the number of simultaneous deletions; refuses more than `bears`."""

    def __init__(self, bears: int = 1000) -> None:
        super().__init__()
        self.bears, self.closing, self.most, self.refused = bears, 0, 0, 0

    async def enter_step(self, name: str) -> None:
        if name != "close":
            return await super().enter_step(name)
        if self.closing >= self.bears:
            self.refused += 1
            raise BackendError("throttled", "too many at once", delivered=False)
        self.closing += 1
        self.most = max(self.most, self.closing)
        try:
            await asyncio.sleep(0.01)
        finally:
            self.closing -= 1


LIMITS = {"start_creating": 4, "max_creating": 8, "creates_per_s": 10_000.0}


async def test_a_drain_deletes_no_more_at_once_than_are_created_at_once() -> None:
    backend = Counted()
    async with running(backend, limits=LIMITS) as gateway:
        await asyncio.gather(*(opened(gateway, open_spec(i)) for i in range(60)))
        await gateway.drain(0.0)
        [deletions] = [each for each in list_limiters(gateway) if each.name == "deletions"]
    assert not backend.running
    assert 4 < backend.most <= 8
    assert (deletions.of, deletions.in_flight, deletions.waiting) == ("embedded", 0, 0)


async def test_deletions_keep_to_the_rate_of_creations() -> None:
    backend = Counted()
    limits = {"creates_per_s": 100.0, "creates_burst": 4}
    async with running(backend, limits=limits) as gateway:
        await asyncio.gather(*(opened(gateway, open_spec(i)) for i in range(24)))
        started = time.monotonic()
        await gateway.drain(0.0)
        assert time.monotonic() - started >= 0.19


async def test_what_a_predecessor_left_is_deleted_as_slowly(tmp_path: Path) -> None:
    backend, path = Counted(), tmp_path / "journal.sqlite"
    journal = InstanceJournal(path)
    for number in range(40):
        journal.record_creating(f"old-{number}", backend="embedded")
        journal.record_created(f"old-{number}", f"instance-{number}")
    journal.close()
    async with running(backend, journal=path, limits=LIMITS) as gateway:
        await until(lambda: gateway.closer.reclaimed == 40)
    assert backend.most <= 8


async def test_a_control_plane_that_bears_few_deletions_gets_fewer() -> None:
    backend = Counted(bears=3)
    limits = {**LIMITS, "start_creating": 16, "max_creating": 64}
    async with running(backend, limits=limits) as gateway:
        await asyncio.gather(*(opened(gateway, open_spec(i)) for i in range(40)))
        await gateway.drain(0.0)
        assert not backend.running
        assert gateway.closer.deletions["embedded"].limit < 16
    assert backend.refused < 40


async def test_a_drain_waits_for_as_long_as_deletions_come_to_an_end() -> None:
    backend = Counted()
    limits = {"start_creating": 1, "max_creating": 1, "creates_per_s": 10_000.0}
    async with running(backend, limits=limits, close_timeout_s=0.1) as gateway:
        await asyncio.gather(*(opened(gateway, open_spec(i)) for i in range(30)))
        await gateway.drain(0.0)
        assert not backend.running
