"""Files that a journal opens, and its errors for the others."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from flotilla_common.run_folder.journal_file import JOURNAL_FILE, SCHEMA_VERSION, JournalError
from flotilla_learner.journal import audit
from flotilla_learner.journal.store import open_journal


async def test_a_journal_of_another_schema_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / JOURNAL_FILE)) as db:
        db.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        db.execute("INSERT INTO meta VALUES ('schema_version', '1')")
        db.commit()
    message = f"has format 1, but .* reads and writes format {SCHEMA_VERSION}. Use the flotilla"
    for _ in range(2):
        with pytest.raises(JournalError, match=message):
            open_journal(tmp_path)
    with closing(sqlite3.connect(tmp_path / JOURNAL_FILE)) as db:
        assert db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall() == [
            ("meta",)
        ]


OLD = "CREATE TABLE meta (key, value); INSERT INTO meta VALUES ('schema_version', '1')"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (OLD, "has format 1"),
        ("CREATE TABLE other (key)", "cannot be read as a journal: no such table"),
        (None, "cannot be read as a journal: unable to open"),
    ],
)
def test_an_audit_of_what_it_cannot_read_has_the_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, why: str
) -> None:
    path = tmp_path / JOURNAL_FILE
    if content is not None:
        with closing(sqlite3.connect(path)) as db:
            db.executescript(content)
    assert audit.main([str(path)]) == 2
    assert why in capsys.readouterr().err


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / JOURNAL_FILE).write_bytes(b"not a database at all" * 100)
    with pytest.raises(JournalError, match="is not a journal"):
        open_journal(tmp_path)


async def test_a_journal_whose_maker_was_killed_is_made_again(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / JOURNAL_FILE)) as db:
        db.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        db.commit()
    journal = open_journal(tmp_path)
    assert await journal.begin_epoch(at_least=1) == 1
    await journal.close()
