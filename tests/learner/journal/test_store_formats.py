"""A journal of the format before is read as it is, and resumed in the present one."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, SCHEMA_VERSION, open_read_only
from flotilla_learner.journal import table_checksums
from flotilla_learner.journal.audit import audit_journal
from flotilla_learner.journal.progress_mark import MARK_FILE, ProgressMark
from flotilla_learner.journal.store import open_journal
from flotilla_learner.journal.table_checksums import current_position, reseal_tables
from tests.learner.run.test_train_loop import following, lease_for, query, run_to_the_end


def to_former(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a journal one of format 6, which had no table of pictures, nor of a teacher's scores or
    a judge's verdicts."""
    later = ("pictures", "teacher_scores", "verdicts")
    former = {name: of for name, of in table_checksums.SEALED.items() if name not in later}
    with monkeypatch.context() as patch, closing(sqlite3.connect(run_dir / JOURNAL_FILE)) as db:
        patch.setattr(table_checksums, "SEALED", former)
        for table in later:
            db.execute(f"DROP TABLE {table}")
        db.execute("UPDATE meta SET value = '6' WHERE key = 'schema_version'")
        position = current_position(db, reseal_tables(db))
        db.commit()
    ProgressMark(run_dir / MARK_FILE).reset_to(position)


def version_of(tmp_path: Path) -> Any:
    return query(tmp_path, "SELECT value FROM meta WHERE key = 'schema_version'")[0][0]


async def test_a_run_of_the_format_before_resumes_with_all_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with following(tmp_path, steps=1) as worker:
        lease = await lease_for(worker, pb.PURPOSE_TRAIN)
        await worker.play(lease)
    to_former(tmp_path / "run", monkeypatch)
    with open_read_only(tmp_path / "run" / JOURNAL_FILE) as db:
        found = audit_journal(db)
    assert found.holds
    assert found.acknowledged == 2
    assert version_of(tmp_path) == "6"
    summary = await run_to_the_end(tmp_path, steps=1)
    assert version_of(tmp_path) == SCHEMA_VERSION
    assert summary["trajectories"]["trained"] == 6
    assert query(tmp_path, f"SELECT state FROM groups WHERE group_id = '{lease.group_id}'") == [
        ("planned",)
    ]


async def test_a_journal_of_format_7_is_resumed_too(tmp_path: Path) -> None:
    """It differs in what trajectories hold; see test_trajectory_codec.py."""
    await open_journal(tmp_path / "run").close()
    with closing(sqlite3.connect(tmp_path / "run" / JOURNAL_FILE)) as db:
        db.execute("UPDATE meta SET value = '7' WHERE key = 'schema_version'")
        position = current_position(db, reseal_tables(db))
        db.commit()
    ProgressMark(tmp_path / "run" / MARK_FILE).reset_to(position)
    with open_read_only(tmp_path / "run" / JOURNAL_FILE) as db:
        assert audit_journal(db).holds
    await open_journal(tmp_path / "run").close()
    assert version_of(tmp_path) == SCHEMA_VERSION


async def test_a_journal_of_format_8_is_resumed_with_a_table_of_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await open_journal(tmp_path / "run").close()
    path = tmp_path / "run" / JOURNAL_FILE
    former = {name: of for name, of in table_checksums.SEALED.items() if name != "verdicts"}
    with monkeypatch.context() as patch, closing(sqlite3.connect(path)) as db:
        patch.setattr(table_checksums, "SEALED", former)
        db.execute("DROP TABLE verdicts")
        db.execute("UPDATE meta SET value = '8' WHERE key = 'schema_version'")
        position = current_position(db, reseal_tables(db))
        db.commit()
    ProgressMark(tmp_path / "run" / MARK_FILE).reset_to(position)
    journal = open_journal(tmp_path / "run")
    assert await journal.count_judge_calls() == 0
    await journal.close()
    assert version_of(tmp_path) == SCHEMA_VERSION


async def test_a_start_that_is_killed_before_its_mark_is_the_new_one_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await open_journal(tmp_path / "run").close()
    to_former(tmp_path / "run", monkeypatch)
    mark = (tmp_path / "run" / MARK_FILE).read_bytes()
    await open_journal(tmp_path / "run").close()
    (tmp_path / "run" / MARK_FILE).write_bytes(mark)
    await open_journal(tmp_path / "run").close()
    assert version_of(tmp_path) == SCHEMA_VERSION
    with closing(sqlite3.connect(tmp_path / "run" / JOURNAL_FILE)) as db:
        (body,) = db.execute("SELECT body FROM seal").fetchone()
        assert "pictures" in json.loads(json.loads(body)["state"])["totals"]
