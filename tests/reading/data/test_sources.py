"""Sources are told apart, and versions of Fleet's tasks lie where Fleet keeps them."""

import hashlib
from pathlib import Path

import pytest

from flotilla_common.tasks.task_files import TaskFileError
from flotilla_reading.data.entries import DataError
from flotilla_reading.data.sources import Fetched, SourceFile, fetch_source, locate_source

FLEETS = "v4/openenv/all_tool_use.json"


@pytest.mark.parametrize(
    ("source", "bucket", "found"),
    [
        ("s3://own/", "ignored", f"s3://own/{FLEETS}"),
        ("s3://own/below", "", f"s3://own/below/{FLEETS}"),
        ("", "fleet-internal-datasets", f"s3://fleet-internal-datasets/{FLEETS}"),
        ("", "gs://elsewhere", f"gs://elsewhere/{FLEETS}"),
        ("copies", "", f"copies/{FLEETS}"),
    ],
)
def test_a_version_lies_in_fleets_layout_below_the_source_or_the_bucket(
    source: str, bucket: str, found: str
) -> None:
    environ = {"S3_DATASET_BUCKET": bucket}
    assert locate_source(source, "v4", "tool_use", environ) == found
    assert locate_source("tasks.json", "", "", environ) == "tasks.json"


@pytest.mark.parametrize(
    ("version", "modality", "message"),
    [
        ("", "", "name a SOURCE, or a version of Fleet's tasks by --data-version"),
        ("v4", "", "--data-version: name the modality too"),
        ("v4", "tool_use", "name the bucket as SOURCE, .* or set S3_DATASET_BUCKET"),
    ],
)
def test_what_is_missing_is_named(version: str, modality: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        locate_source("", version, modality, {})
    with pytest.raises(DataError, match="Fleet's API has no versions"):
        locate_source("fleet:shop", "v4", "tool_use", {})


def fetch(source: Path) -> Fetched:
    return fetch_source(str(source), lambda *_: None)


def test_a_local_file_is_recorded_by_its_path_and_content(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    path.write_bytes(b"[]")
    sha256 = hashlib.sha256(b"[]").hexdigest()
    assert fetch(path).to_dict() == {"kind": "file", "url": str(path), "sha256": sha256}
    with pytest.raises(TaskFileError, match="there is no such task file"):
        fetch(tmp_path / "nowhere")
    with pytest.raises(DataError, match="is a folder without Harbor tasks"):
        fetch(tmp_path)


@pytest.mark.parametrize("broken", ["task.toml", "instruction.md"])
def test_a_harbor_task_that_cannot_be_read_is_named(tmp_path: Path, broken: str) -> None:
    (tmp_path / "task.toml").write_text("version = '1.0'")
    (tmp_path / "instruction.md").write_text("Do it.")
    (tmp_path / broken).write_bytes(b"\xff = ")
    with pytest.raises(DataError, match=broken):
        fetch(tmp_path)


def test_several_files_have_the_digest_of_what_sha256sum_prints() -> None:
    files = [SourceFile("a", b"1", "ETag x"), SourceFile("b", b"2")]
    one, two = (hashlib.sha256(data).hexdigest() for data in (b"1", b"2"))
    found = Fetched("hub", "hf://x", files, revision="c0").to_dict()
    assert found == {
        "kind": "hub",
        "url": "hf://x",
        "revision": "c0",
        "sha256": hashlib.sha256(f"{one}  a\n{two}  b\n".encode()).hexdigest(),
        "files": {
            "a": {"version": "ETag x", "sha256": one},
            "b": {"version": "", "sha256": two},
        },
    }
