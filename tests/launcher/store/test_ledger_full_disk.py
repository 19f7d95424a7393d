"""A ledger on a disk that is full for a while: SQLite itself refuses to write."""

import asyncio
import sqlite3
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from flotilla_launcher.control.supervisor import Supervisor
from flotilla_launcher.state import LEARNER, ROLLOUT, Replica, ReplicaState, RunState
from flotilla_launcher.store.ledger import Ledger
from tests.launcher.control.test_replica_actions import registered
from tests.support.fake_backend import FakeBackend
from tests.support.launcher import ServedLauncher, serving, spec
from tests.support.waiting import until

# SQLite's own maximum.
_ALL_PAGES = 0xFFFFFFFE


@asynccontextmanager
async def running(
    folder: Path, backend: FakeBackend
) -> AsyncGenerator[tuple[ServedLauncher, Supervisor]]:
    async with serving(folder, backend) as served:
        run_id = await served.start(spec(launcher={"max_restarts": 9, "drain_s": 1.0}))
        await served.until(run_id, lambda run: len(run.replicas) == 3)
        await registered(served, run_id)
        supervisor = served.launcher.get_supervisor(run_id)
        assert supervisor is not None
        await until(lambda: supervisor.run.state is RunState.RUNNING)
        yield served, supervisor


def rollout_of(supervisor: Supervisor) -> Replica:
    return supervisor.run.replicas[ROLLOUT, 0]


@contextmanager
def full(store: Ledger, run_id: str) -> Generator[None]:
    """Let no page be added to the ledger meanwhile; every write needs one."""
    db: sqlite3.Connection = vars(store)["_db"]
    db.execute("CREATE TABLE filler (content)")
    db.execute(
        "CREATE TRIGGER fill AFTER INSERT ON events BEGIN"
        " INSERT INTO filler VALUES (randomblob(100000)); END"
    )
    db.execute(
        "CREATE TRIGGER fill_too AFTER UPDATE ON operations BEGIN"
        " INSERT INTO filler VALUES (randomblob(100000)); END"
    )
    db.execute("PRAGMA max_page_count = 1")
    with pytest.raises(sqlite3.OperationalError, match="full"), store.transaction():
        store.add_event(run_id, 1.0, "message", {})
    yield
    db.execute("DROP TRIGGER fill")
    db.execute("DROP TRIGGER fill_too")
    db.execute(f"PRAGMA max_page_count = {_ALL_PAGES}")


async def test_a_run_outlives_a_full_disk_and_starts_nothing_that_is_not_written_down(
    tmp_path: Path,
) -> None:
    backend = FakeBackend()
    async with running(tmp_path, backend) as (served, supervisor):
        store, run_id = served.launcher.store, supervisor.run.run_id
        with full(store, run_id):
            backend.finish_unit(backend.list_running(ROLLOUT)[0], 1)
            await until(lambda: rollout_of(supervisor).state is ReplicaState.RESTARTING)
            await asyncio.sleep(0.5)
            assert len(backend.launches) == 3, "its start could not be written down"
            assert backend.killed == []
            assert supervisor.run.state is RunState.RUNNING
        await until(lambda: len(backend.launches) == 4)
        kept = store.get_run(run_id)
        assert kept is not None
        assert kept.run.replicas[ROLLOUT, 0].failures == rollout_of(supervisor).failures
        reported = [event.body.get("text", "") for event in store.list_events(run_id, 0)]
        assert any("exited with code 1; restart 1 of 9" in text for text in reported)


async def test_an_end_that_could_not_be_written_down_is_written_when_it_can(
    tmp_path: Path,
) -> None:
    backend = FakeBackend()
    async with running(tmp_path, backend) as (served, supervisor):
        store, run_id = served.launcher.store, supervisor.run.run_id
        with full(store, run_id):
            state = asyncio.create_task(served.launcher.stop_run(run_id, 1.0))
            await until(lambda: not backend.list_running(LEARNER))
            kept = store.get_run(run_id)
            assert kept is not None
            assert kept.run.state is RunState.RUNNING
        assert await asyncio.wait_for(state, 15) is RunState.STOPPED
        await until(lambda: served.launcher.get_supervisor(run_id) is None)
        kept = store.get_run(run_id)
        assert kept is not None
        assert (kept.run.state, bool(kept.ended)) == (RunState.STOPPED, True)
