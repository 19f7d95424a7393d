"""Files of a run that are sent to remote readers: which, and what delays them."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from services.launcher.store import relayed_files
from services.launcher.store.relayed_files import (
    KnownCopy,
    NoJournalError,
    NoRoomError,
    TooLargeError,
    is_relayed,
    opened_files,
)


class DiskUsage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """A journal with a commit that is so far only in its log."""
    path = tmp_path / "journal.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE groups (group_id TEXT)")
    return path


@pytest.mark.parametrize(
    "path",
    [
        *("/etc/passwd", "../launcher.json", "token_stats/../spec.json", "journal.sqlite-wal"),
        *("token_stats/step_1.npz/x", "token_stats/step_x.npz", ".env", "logs/learner-0.log", ""),
    ],
)
def test_no_other_path_is_sent_or_taken(path: str) -> None:
    assert not is_relayed(path)


def test_a_commit_in_the_log_of_a_live_journal_is_in_its_copy(
    journal: Path, tmp_path: Path
) -> None:
    with closing(sqlite3.connect(journal, isolation_level=None)) as writer:
        writer.execute("INSERT INTO groups VALUES ('new')")
        with opened_files(tmp_path, {}) as files:
            [file] = files.changed()
            data = b"".join(block for _, block in files.read_changed(file))
            version = file.version
        with opened_files(tmp_path, {"journal.sqlite": KnownCopy(version)}) as files:
            assert files.journal is None and files.changed() == []
        writer.execute("INSERT INTO groups VALUES ('newer')")
        with opened_files(tmp_path, {"journal.sqlite": KnownCopy(version)}) as files:
            assert [file.path for file in files.changed()] == ["journal.sqlite"]
    copy = tmp_path / "copy.sqlite"
    copy.write_bytes(data)
    with closing(sqlite3.connect(copy)) as db:
        assert db.execute("SELECT * FROM groups").fetchall() == [("new",)]
        assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    assert list(tmp_path.glob(".relayed-*")) == []


def test_a_folder_that_is_a_link_is_not_entered(journal: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "step_000001.npz").write_bytes(b"secret")
    (tmp_path / "token_stats").symlink_to(other)
    with opened_files(tmp_path, {}) as files:
        assert [file.path for file in files.files] == ["journal.sqlite"]


def test_a_journal_that_is_a_link_is_none(journal: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "journal.sqlite").symlink_to(journal)
    with pytest.raises(NoJournalError), opened_files(run_dir, {}):
        pass


def test_a_file_that_is_pruned_while_it_is_read_is_an_error_of_that_file_alone(
    journal: Path, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("{}\n")
    with opened_files(tmp_path, {}) as files:
        path.write_text("")
        first = files.changed()[0]
        assert first.path == "metrics.jsonl"
        with pytest.raises(OSError, match="has shrunk"):
            list(files.read_changed(first))


def test_a_copy_never_takes_the_rooms_last_gigabyte(
    journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = DiskUsage(1 << 40, 1 << 40, 1 << 30)
    monkeypatch.setattr(relayed_files.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(NoRoomError, match=r"1\.0 GiB left: free disk"), opened_files(tmp_path, {}):
        pass


def test_a_journal_beyond_the_bound_is_not_copied(
    journal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relayed_files, "MOST_BYTES", 1000)
    with pytest.raises(TooLargeError), opened_files(tmp_path, {}):
        pass
