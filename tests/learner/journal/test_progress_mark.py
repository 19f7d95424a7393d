"""A journal that is behind the acknowledged progress is noticed before the run resumes."""

import json
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import pytest_asyncio

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, JournalError
from flotilla_learner.checkpoints.accept_loss_command import accept_loss
from flotilla_learner.checkpoints.checkpoint_folders import Checkpoints
from flotilla_learner.checkpoints.uploads import CheckpointUploads
from flotilla_learner.journal.audit import Audit, audit_journal
from flotilla_learner.journal.progress_mark import MARK_FILE as MARK
from flotilla_learner.journal.startup_check import CheckedJournal, check_journal
from flotilla_learner.journal.store import lock_journal, open_journal
from tests.learner.journal.stopped_run import (
    DAMAGES,
    ENOUGH,
    PLAYED,
    STEPS,
    damage,
    stopped_run,
)
from tests.learner.run.test_train_loop import run_to_the_end

WAL = f"{JOURNAL_FILE}-wal"
CHECKPOINTS = ("step-000002", "step-000004")
# Of the stopped run: three groups of two attempts for each step, and one that waits.
RECEIVED = 6 * PLAYED + 2


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    await stopped_run(folder)
    return folder / "run"


@pytest.fixture
def run_dir(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def contents(run_dir: Path) -> dict[str, bytes]:
    """All files except those that SQLite recreates: an empty log and the index of a log."""
    files = (path for path in run_dir.rglob("*") if path.is_file() and path.stat().st_size)
    return {str(p): p.read_bytes() for p in files if not p.name.endswith("-shm")}


def books(run_dir: Path) -> Audit:
    with closing(sqlite3.connect(run_dir / JOURNAL_FILE)) as db:
        return audit_journal(db)


def change(run_dir: Path, sql: str) -> None:
    """Change rows as damage on the disk does, not as a learner does."""
    with closing(sqlite3.connect(run_dir / JOURNAL_FILE)) as db:
        assert db.execute(sql).rowcount, sql
        db.commit()


def refused(run_dir: Path, *words: str) -> str:
    """Return the error of a start that resumes nothing and changes nothing."""
    before = contents(run_dir)
    with pytest.raises(JournalError) as caught:
        open_journal(run_dir)
    assert contents(run_dir) == before
    assert all(word in str(caught.value) for word in words), str(caught.value)
    return str(caught.value)


def kept_checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


TRIALS = [("removed", 0), *((kind, number) for number in range(5) for kind in DAMAGES)]


@pytest.mark.parametrize(("kind", "seed"), TRIALS)
def test_a_damaged_write_ahead_log_is_refused_by_its_name(
    run_dir: Path, kind: str, seed: int
) -> None:
    damage(run_dir / WAL, kind, random.Random(f"{kind}{seed}"))
    refused(run_dir, str(run_dir / WAL), "commits", "--accept-loss")
    assert kept_checkpoints(run_dir) == [*CHECKPOINTS]


async def test_a_resume_without_the_log_begins_nothing_and_deletes_no_checkpoint(
    run_dir: Path, tmp_path: Path
) -> None:
    (run_dir / WAL).unlink()
    before = contents(run_dir)
    with pytest.raises(ConfigError, match=f"{WAL} was removed, cut or damaged"):
        await run_to_the_end(tmp_path, **ENOUGH)
    assert contents(run_dir) == before


async def test_a_whole_checkpoint_that_is_newer_than_the_journal_is_never_removed(
    run_dir: Path,
) -> None:
    shutil.move(run_dir / "checkpoints", run_dir / "aside")
    for name in (JOURNAL_FILE, WAL, MARK, "metrics.jsonl"):
        (run_dir / name).unlink()
    journal = open_journal(run_dir)
    shutil.move(run_dir / "aside", run_dir / "checkpoints")
    (run_dir / "checkpoints/step-000006").mkdir()
    checkpoints = Checkpoints(
        run_dir, journal, CheckpointUploads(), run_id="run", run_epoch=1, keep=2
    )
    assert await checkpoints.find_newest() is None
    assert kept_checkpoints(run_dir) == [*CHECKPOINTS]
    await journal.close()


def test_a_stopped_run_is_opened_and_nothing_is_logged(run_dir: Path) -> None:
    found = check_journal(run_dir, "run")
    assert (found.damaged, found.bad_mark, found.cut_short) == ([], "", False)
    assert found.position is not None
    assert (found.position.step, found.position.acknowledged) == (PLAYED, RECEIVED)


@pytest.mark.parametrize("kind", ["removed", *DAMAGES])
async def test_an_accepted_loss_is_counted_and_the_newest_checkpoint_gone_on_from(
    run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    damage(run_dir / WAL, kind, random.Random(kind))
    restored = accept_loss(run_dir)
    assert restored is not None
    assert restored.step >= 4
    assert kept_checkpoints(run_dir) == [*CHECKPOINTS]
    assert books(run_dir).acknowledged == RECEIVED
    assert books(run_dir).fates.get("lost_with_disk", 0) == restored.lost
    assert accept_loss(run_dir) is None
    summary = await run_to_the_end(tmp_path, **ENOUGH)
    assert "lost with the disk: at least" in "".join(capfd.readouterr())
    assert summary["steps"] == STEPS
    assert summary["trajectories"].get("lost_with_disk", 0) == restored.lost
    assert books(run_dir).holds
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert sorted(set(steps)) == list(range(1, STEPS + 1))


async def test_a_loss_after_the_newest_checkpoint_costs_what_came_after_it_alone(
    stopped: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(stopped, run_dir)
    frame = 24 + 4096
    log = (run_dir / WAL).read_bytes()
    (run_dir / WAL).write_bytes(log[: len(log) - 3 * frame])
    refused(run_dir, str(run_dir / WAL))
    restored = accept_loss(run_dir)
    assert restored is not None
    assert (restored.step, restored.lost, restored.lost_steps) == (PLAYED, 1, 0)
    assert (await run_to_the_end(tmp_path, **ENOUGH))["trajectories"]["lost_with_disk"] == 1


@pytest.mark.parametrize("kind", ["removed", "cut", "torn"])
async def test_a_run_without_its_journal_resumes_from_its_newest_checkpoint(
    run_dir: Path, tmp_path: Path, kind: str
) -> None:
    # Half of the file has not all tables; a part of the log may have those of an older commit.
    path = run_dir / JOURNAL_FILE
    kept = path.read_bytes()[: path.stat().st_size // 2]
    path.write_bytes(kept + bytes(len(kept) if kind == "torn" else 0))
    (run_dir / WAL).unlink()
    if kind == "removed":
        path.unlink()
    refused(
        run_dir,
        str(run_dir / JOURNAL_FILE),
        f"{RECEIVED} acknowledged" if kind == "removed" else "",
    )
    restored = accept_loss(run_dir)
    assert restored is not None
    assert restored.step == 4
    assert books(run_dir).acknowledged == RECEIVED
    summary = await run_to_the_end(tmp_path, **ENOUGH)
    assert summary["trajectories"]["lost_with_disk"] == RECEIVED
    assert (run_dir / "damaged-journal-1" / JOURNAL_FILE).exists() == (kind != "removed")


# Effects of a flipped bit on rows, and the message about each.
ROWS = {
    "a reopened group": (
        "UPDATE groups SET state = 'open', step = NULL WHERE group_id = 'g000004r0'",
        "group g000004r0 is in the plan of step 2, but it is open",
    ),
    "a group of another step": (
        "UPDATE groups SET step = 3 WHERE group_id = 'g000004r0'",
        "group g000004r0 is in the plan of step 2, but it is planned for step 3",
    ),
    "a deleted group": (
        "DELETE FROM groups WHERE group_id = 'g000004r0'",
        "2 trajectories belong to group g000004r0, which is missing",
    ),
    "a deleted plan": ("DELETE FROM plans WHERE step = 5", "plans has 4 rows instead of 5"),
    "a changed plan": (
        "UPDATE plans SET attempts = replace(attempts, ', 0, 0', ', 1, 0') WHERE step = 2",
        "the journal's plan of step 2 is damaged",
    ),
    "a deleted trajectory": (
        "DELETE FROM trajectories WHERE group_id = 'g000004r0' AND attempt_index = 1",
        f"trajectories has {RECEIVED - 1} rows instead of {RECEIVED}",
    ),
    "a dropped try": (
        "UPDATE trajectories SET dropped = 'late' WHERE group_id = 'g000004r0'",
        "rows of trajectories differ from what was written",
    ),
    "a lost array": (
        "UPDATE trajectories SET payload = NULL WHERE group_id = 'g000015r0'",
        "rows of trajectories differ from what was written",
    ),
    "another fork": ("UPDATE epochs SET forked_version = 1", "rows of epochs"),
    "another lease": ("UPDATE leases SET worker_id = 'w1'", "rows of leases"),
    "another fingerprint": ("UPDATE publications SET fingerprint = x'00'", "rows of publications"),
    "another note": ("UPDATE meta SET value = '7' WHERE key = 'began_with'", "rows of meta"),
    "another checkpoint": ("DELETE FROM checkpoints WHERE step = 4", "checkpoints has 1 rows"),
    "another order of tasks": ("UPDATE curriculum SET number = number + 1", "rows of curriculum"),
    "another seal": ("UPDATE seal SET body = replace(body, '1', '2')", "its seal"),
}


@pytest.mark.parametrize("name", ROWS)
async def test_rows_that_are_not_what_was_written_are_refused(run_dir: Path, name: str) -> None:
    sql, message = ROWS[name]
    change(run_dir, sql)
    refused(run_dir, f"{run_dir / JOURNAL_FILE} is ", message, "--accept-loss")
    restored = accept_loss(run_dir)
    assert restored is not None
    assert (restored.step, restored.lost) == (4, RECEIVED)
    await open_journal(run_dir).close()


def test_an_index_that_disagrees_with_its_table_is_refused(run_dir: Path) -> None:
    with closing(sqlite3.connect(run_dir / JOURNAL_FILE)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page,) = db.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_groups_1'"
        ).fetchone()
    path = run_dir / JOURNAL_FILE
    data = bytearray(path.read_bytes())
    at = data.index(b"g000004r0", (page - 1) * 4096, page * 4096)
    data[at + 6] ^= 4
    path.write_bytes(data)
    refused(
        run_dir, f"{path} is damaged: 2 trajectories belong to group g000004r0, which is missing"
    )


async def test_an_old_journal_is_refused(run_dir: Path, tmp_path: Path) -> None:
    old = Path(shutil.copytree(run_dir, tmp_path / "old"))
    await run_to_the_end(tmp_path, **ENOUGH)
    for name in (JOURNAL_FILE, WAL):
        shutil.copyfile(old / name, run_dir / name)
    refused(run_dir, str(run_dir / WAL), str(run_dir / MARK))


@pytest.mark.parametrize("witness", ["checkpoints", "metrics.jsonl"])
async def test_an_old_journal_with_its_old_mark_is_refused_for_what_came_after_it(
    run_dir: Path, tmp_path: Path, witness: str
) -> None:
    old = Path(shutil.copytree(run_dir, tmp_path / "old"))
    await run_to_the_end(tmp_path, **ENOUGH)
    for name in (JOURNAL_FILE, WAL, MARK):
        shutil.copyfile(old / name, run_dir / name)
    other = "metrics.jsonl" if witness == "checkpoints" else "checkpoints"
    shutil.rmtree(run_dir / other, ignore_errors=True)
    (run_dir / other).unlink(missing_ok=True)
    refused(run_dir, str(run_dir / JOURNAL_FILE), str(run_dir / witness), "--accept-loss")
    restored = accept_loss(run_dir)
    assert restored is not None
    assert restored.step == (STEPS if witness == "checkpoints" else PLAYED)


@pytest.mark.parametrize("kind", ["removed", "emptied", "old"])
async def test_a_mark_that_is_damaged_alone_is_rebuilt_and_reported(
    run_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    mark = run_dir / MARK
    old = mark.read_bytes()
    if kind == "removed":
        mark.unlink()
    elif kind == "emptied":
        mark.write_bytes(bytes(len(old)))
    else:
        await run_to_the_end(tmp_path, **ENOUGH)
        mark.write_bytes(old)
    capfd.readouterr()
    journal = open_journal(run_dir)
    assert [incident.kind for incident in journal.incidents.newest] == ["damaged_mark"]
    assert str(mark) in journal.incidents.newest[0].text
    await journal.close()
    assert check_journal(run_dir, "run").bad_mark == ""
    damage(run_dir / JOURNAL_FILE, "torn", random.Random(0))
    refused(run_dir, str(run_dir / JOURNAL_FILE))


def test_one_bit_of_the_mark_costs_nothing(run_dir: Path) -> None:
    whole = (run_dir / MARK).read_bytes()
    for seed in range(20):
        damage(run_dir / MARK, "one bit", random.Random(seed))
        found = check_journal(run_dir, "run")
        assert found == CheckedJournal(found.position)
        (run_dir / MARK).write_bytes(whole)


async def test_a_kill_between_a_commit_and_its_mark_is_no_damage(run_dir: Path) -> None:
    journal = open_journal(run_dir)
    before = (run_dir / MARK).read_bytes()
    await journal.set_meta({"one": 1})
    await journal.close()
    (run_dir / MARK).write_bytes(before)
    journal = open_journal(run_dir)
    assert not journal.incidents.newest
    await journal.close()


async def test_a_kill_between_a_new_journal_and_its_first_mark_is_no_damage(
    tmp_path: Path,
) -> None:
    await open_journal(tmp_path).close()
    (tmp_path / MARK).unlink()
    journal = open_journal(tmp_path)
    await journal.set_meta({"one": 1})
    assert not journal.incidents.newest
    await journal.close()
    assert check_journal(tmp_path, tmp_path.name).bad_mark == ""


async def test_a_journal_whose_commits_went_another_way_is_refused(
    run_dir: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(run_dir, tmp_path / "other" / "run"))
    for folder, value in ((run_dir, 1), (other, 2)):
        journal = open_journal(folder)
        await journal.set_meta({"way": value})
        await journal.close()
    shutil.copyfile(other / MARK, run_dir / MARK)
    refused(run_dir, str(run_dir / JOURNAL_FILE), str(run_dir / MARK), "their commits differ")


async def test_the_mark_of_another_journal_of_the_run_is_refused(
    run_dir: Path, tmp_path: Path
) -> None:
    await open_journal(tmp_path / "other" / "run").close()
    shutil.copyfile(tmp_path / "other" / "run" / MARK, run_dir / MARK)
    refused(run_dir, f"{run_dir / MARK} belongs to another journal than {run_dir / JOURNAL_FILE}")


def test_a_checkpoint_that_is_damaged_or_a_line_that_is_is_no_sign_of_a_loss(run_dir: Path) -> None:
    shutil.copytree(run_dir / "checkpoints" / CHECKPOINTS[1], run_dir / "checkpoints/step-000008")
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 905, "time": 1.0}\n{"stdp": 6}\n[]\n\x00\n')
    found = check_journal(run_dir, "run")
    assert found == CheckedJournal(found.position)


def test_nothing_is_accepted_while_a_learner_works_on_the_run(run_dir: Path) -> None:
    with lock_journal(run_dir), pytest.raises(JournalError, match="another learner works on"):
        accept_loss(run_dir)


def test_a_start_reads_no_longer_than_it_may(run_dir: Path) -> None:
    found = check_journal(run_dir, "run", limit_s=-1.0)
    assert (found.cut_short, found.bad_mark) == (True, "")
