"""A record that is not what was written is found before it is trained on, and never is."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, JournalError
from flotilla_common.run_folder.record_digests import DamagedRecordError
from flotilla_learner.journal.audit import audit_journal
from flotilla_learner.journal.schema import Plan
from flotilla_learner.journal.store import Journal, open_journal
from flotilla_learner.run.step_trainer import ReplayError
from flotilla_learner.types import StepSettings
from tests.learner.run.test_train_loop import following, lease_for, query, rows_of, run_to_the_end
from tests.support.learner import FakeWorker

# What SQL makes of one row.
DAMAGES = {
    "an array": "payload = CAST(substr(payload, 1, 20) || x'ff' || substr(payload, 22) AS BLOB)",
    "a cut array": "payload = CAST(substr(payload, 1, 20) AS BLOB)",
    "the reward": "reward = 1.0 - reward",
    "the failure": "failure = 'aborted'",
    "a span": "summary = replace(summary, '\"turns\": 2', '\"turns\": 3')",
    "the whole summary": "summary = substr(summary, 1, 40)",
    "a digest": "content_digest = x'00'",
}


def change(folder: Path, sql: str) -> None:
    with closing(sqlite3.connect(folder / "run" / JOURNAL_FILE)) as db:
        assert db.execute(sql).rowcount, sql
        db.commit()


async def sample(worker: FakeWorker, groups: int) -> list[str]:
    """Play so many groups; returns their ids."""
    leases = [await lease_for(worker, pb.PURPOSE_TRAIN) for _ in range(groups)]
    for lease in leases:
        await worker.play(lease)
    return [lease.group_id for lease in leases]


def planned(folder: Path) -> set[str]:
    sql = "SELECT DISTINCT json_extract(value, '$[0]') FROM plans, json_each(plans.attempts)"
    return {group for (group,) in query(folder, sql)}


def fates(folder: Path) -> dict[str, int]:
    with closing(sqlite3.connect(folder / "run" / JOURNAL_FILE)) as db:
        found = audit_journal(db)
    assert sum(found.fates.values()) == found.acknowledged
    return found.fates


@pytest.mark.parametrize("damage", DAMAGES)
async def test_any_damage_is_found_when_a_record_is_read(tmp_path: Path, damage: str) -> None:
    async with following(tmp_path) as worker:
        (group,) = await sample(worker, 1)
    change(tmp_path, f"UPDATE trajectories SET {DAMAGES[damage]} WHERE attempt_index = 1")
    journal = open_journal(tmp_path / "run")
    keys = [AttemptKey(group, n, 0) for n in (0, 1)]
    try:
        with pytest.raises(DamagedRecordError) as error:
            await journal.load_trajectories(keys)
        assert error.value.keys == (keys[1],)
        assert await journal.find_damaged(keys) == [keys[1]]
    finally:
        await journal.close()


async def test_a_damaged_group_is_dropped_with_a_reason_and_others_take_its_place(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async with following(tmp_path, steps=1) as worker:
        bad, *_ = await sample(worker, 2)
        change(
            tmp_path,
            f"UPDATE trajectories SET {DAMAGES['an array']}"
            f" WHERE group_id = '{bad}' AND attempt_index = 1",
        )
        for _ in range(2):
            await sample(worker, 1)
        await rows_of(tmp_path, "SELECT * FROM plans")
    assert len(planned(tmp_path)) == 3
    assert bad not in planned(tmp_path)
    assert fates(tmp_path)["dropped/corrupt_record"] == 2
    assert "records of the journal are damaged" in "".join(capfd.readouterr())


async def test_a_damaged_group_that_was_not_planned_yet_is_dropped_at_the_next_start(
    tmp_path: Path,
) -> None:
    async with following(tmp_path, steps=1) as worker:
        (bad,) = await sample(worker, 1)
    change(tmp_path, f"UPDATE trajectories SET {DAMAGES['the whole summary']}")
    summary = await run_to_the_end(tmp_path, steps=1)
    assert bad not in planned(tmp_path)
    assert summary["trajectories"]["dropped/corrupt_record"] == 2
    assert summary["trajectories"]["trained"] == 6


async def interrupted(folder: Path) -> list[str]:
    """A run that stops after its first step, without a checkpoint; the groups of the step."""
    async with following(folder, steps=2, checkpoint={"every": 10}) as worker:
        groups = await sample(worker, 3)
        await rows_of(folder, "SELECT * FROM plans")
        await asyncio.sleep(0.2)
    return groups


async def test_a_replay_skips_and_reports_a_damaged_group(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bad, *others = await interrupted(tmp_path)
    change(tmp_path, f"UPDATE trajectories SET reward = 7 WHERE group_id = '{bad}'")
    await run_to_the_end(tmp_path, steps=2, checkpoint={"every": 10})
    assert bad not in planned(tmp_path)
    assert set(others) < planned(tmp_path)
    assert fates(tmp_path) == {"dropped/corrupt_record": 2, "trained": 10}
    assert "records of the journal are damaged" in "".join(capfd.readouterr())


async def test_a_step_of_which_nothing_is_left_cannot_be_replayed(tmp_path: Path) -> None:
    await interrupted(tmp_path)
    change(tmp_path, "UPDATE trajectories SET reward = 7")
    with pytest.raises(
        ReplayError, match="every trajectory of step 1 differs from what was journaled"
    ):
        await run_to_the_end(tmp_path, steps=2)


@pytest.fixture
async def journal(tmp_path: Path) -> Journal:
    return open_journal(tmp_path / "run")


async def test_a_plan_comes_back_as_it_was_committed(journal: Journal) -> None:
    keys = (AttemptKey("g0", 0, 0), AttemptKey("g0", 1, 2))
    plan = Plan(1, keys, StepSettings(ratio_limit=2.0))
    await journal.commit_plan(plan, 1, ["g0"], [])
    assert await journal.plans_after(0) == [plan]
    await journal.close()


async def test_a_damaged_plan_stops_the_resume(journal: Journal, tmp_path: Path) -> None:
    await journal.commit_plan(Plan(1, (AttemptKey("g0", 0, 0),)), 1, ["g0"], [])
    change(tmp_path, "UPDATE plans SET attempts = replace(attempts, ', 0, 0', ', 1, 0')")
    with pytest.raises(JournalError, match="the journal's plan of step 1 is damaged: restore"):
        await journal.plans_after(0)
    await journal.close()


async def test_a_file_with_damaged_pages_is_reported(journal: Journal, tmp_path: Path) -> None:
    await journal.set_meta({f"key{n}": "x" * 500 for n in range(100)})
    await journal.close()
    path = tmp_path / "run" / JOURNAL_FILE
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises(JournalError, match=r"not a journal, or damaged: .*malformed"):
        open_journal(tmp_path / "run")
