"""A prepared folder is written whole, is the same each time, and replaces nothing else."""

import errno
import hashlib
import json
from pathlib import Path

import pytest

from flotilla_common.tasks.data_manifest import MANIFEST, read_manifest
from flotilla_common.tasks.task_files import TaskFileError, read_tasks
from flotilla_reading.data.dataset_folder import (
    Origin,
    describe,
    read_parts,
    write_folder,
)
from flotilla_reading.data.entries import DataError
from flotilla_reading.data.preparation import Wishes, prepare
from flotilla_reading.data.quarantine import Rule
from flotilla_reading.data.row_files import FileFormat
from tests.reading.data.made_tasks import make_row, make_rows, to_rows

RULE = Rule("gone", "", "no solution", "2026-11-28", "run 7")
ROWS = [*make_rows({"shop": 60, "desk": 3}), make_row("gone"), make_row("blank", prompt="")]
SOURCE = {"kind": "file", "url": "tasks.json", "sha256": "12"}
NO_TEXT = make_row("\ud800", prompt="x")


def write(out: Path, form: FileFormat = "jsonl") -> None:
    wishes = Wishes(quarantine=[RULE])
    prepared = prepare(to_rows(ROWS), wishes)
    origins = SOURCE, Origin("rules.jsonl", "34")
    write_folder(out, prepared, describe(prepared, wishes, *origins), form)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_the_files_are_task_files_with_every_task_that_is_kept(
    tmp_path: Path, form: FileFormat
) -> None:
    out = tmp_path / "deep" / "data"
    write(out, form)
    assert sorted(content(out)) == [f"eval.{form}", "manifest.json", f"train.{form}"]
    train, held = (list(read_tasks(out / f"{part}.{form}")) for part in ("train", "eval"))
    assert len(train) == 57
    assert len(held) == 6
    assert [json.loads(each.text) in ROWS for each in train + held] == [True] * 63
    assert read_parts(out) == {"train": train, "eval": held}


def test_the_manifest_accounts_for_the_source_and_vouches_for_the_files(tmp_path: Path) -> None:
    out = tmp_path / "data"
    write(out)
    manifest = read_manifest(out / MANIFEST)
    assert manifest["source"] == SOURCE
    assert manifest["quarantine"] == {
        "path": "rules.jsonl",
        "sha256": "34",
        "rules": [{**RULE.to_dict(), "tasks": 1}],
    }
    assert manifest["counts"] == {
        "source": 65,
        "train": 57,
        "eval": 6,
        "dropped": {"invalid": 1, "quarantined": 1},
    }
    assert manifest["environments"] == {
        "desk": {"train": 3},
        "shop": {"eval": 6, "invalid": 1, "quarantined": 1, "train": 54},
    }
    assert manifest["dropped"][1] == {
        "place": "task 64",
        "key": "blank",
        "env": "shop",
        "reason": "invalid",
        "detail": "needs a non-empty string 'prompt'",
    }
    for name, about in manifest["files"].items():
        assert about["sha256"] == hashlib.sha256((out / name).read_bytes()).hexdigest()
    digests = manifest["tasks"]["train"] | manifest["tasks"]["eval"]
    assert len(set(digests.values())) == len(digests) == 63
    assert {"version", "commit"} == set(manifest["written_by"])


def test_the_same_source_and_wishes_make_the_same_bytes_in_place_of_the_old(
    tmp_path: Path,
) -> None:
    write(tmp_path / "data", "json")
    write(tmp_path / "data")
    write(tmp_path / "other")
    assert content(tmp_path / "data") == content(tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "other"]


@pytest.mark.parametrize("name", ["notes.txt", "manifest.json"])
def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path, name: str) -> None:
    out = tmp_path / "data"
    out.mkdir()
    (out / name).write_text("mine")
    with pytest.raises((DataError, TaskFileError), match=str(out)):
        write(out)
    assert content(out) == {name: b"mine"}
    assert list(tmp_path.iterdir()) == [out]


def test_a_file_beside_prepared_ones_or_a_changed_one_is_not_lost(tmp_path: Path) -> None:
    out = tmp_path / "data"
    write(out)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"holds something else \(notes.txt\)"):
        write(out)
    (out / "notes.txt").unlink()
    with (out / "train.jsonl").open("a") as file:
        file.write(json.dumps(make_row("mine")) + "\n")
    with pytest.raises(DataError, match=r"train\.jsonl was changed since it was prepared"):
        write(out)
    with pytest.raises(DataError, match=r"train\.jsonl was changed since it was prepared"):
        read_parts(out)


def test_a_dropped_row_may_hold_what_is_not_text(tmp_path: Path) -> None:
    wishes = Wishes()
    prepared = prepare(to_rows([*ROWS, NO_TEXT]), wishes)
    write_folder(
        *(tmp_path / "data", prepared),
        *(describe(prepared, wishes, SOURCE, None), "jsonl"),
    )
    assert read_manifest(tmp_path / "data" / MANIFEST)["dropped"][-1]["key"] == "\ud800"


def test_a_manifest_of_another_format_is_refused_with_both_numbers(tmp_path: Path) -> None:
    write(tmp_path / "data")
    path = tmp_path / "data" / "manifest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(TaskFileError, match="has format 99, and this Flotilla reads 1"):
        read_parts(tmp_path / "data")


def test_what_a_killed_preparation_left_is_removed_and_other_folders_are_not(
    tmp_path: Path,
) -> None:
    (tmp_path / ".flotilla-data-killed" / "made").mkdir(parents=True)
    (tmp_path / ".data-backup").mkdir()
    write(tmp_path / "data")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".data-backup", "data"]


def test_nothing_is_left_of_a_preparation_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "data")
    before = content(tmp_path / "data")

    def fail(path: Path) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    monkeypatch.setattr("flotilla_reading.data.dataset_folder.sync_path", fail)
    with pytest.raises(DataError, match="data cannot be written: the disk is full"):
        write(tmp_path / "data", "json")
    assert content(tmp_path / "data") == before
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
