"""Files of stores are fetched once per version, whole, and go on where they stopped."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import boto3
import fsspec
import httpx
import pytest

from flotilla_reading.data.adapters import store_files
from flotilla_reading.data.entries import DataError
from flotilla_reading.data.sources import Fetched, fetch_source
from tests.reading.data.made_tasks import make_rows
from tests.support.remote_checkpoints import BUCKET, s3_server
from tests.support.repository import ROOT

BLOCK = 1000
NAME = "v4/openenv/all_tool_use.json"
URL = f"s3://{BUCKET}/{NAME}"


def content(tasks: int) -> bytes:
    return json.dumps({"tasks": make_rows({"shop": tasks})}).encode()


FIRST, SECOND = content(100), content(101)
LENGTH = len(FIRST)


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Any]:
    """A client of an S3 that the environment names, and small blocks."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(store_files, "_BLOCK", BLOCK)
    with s3_server() as endpoint:
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        client: Any = boto3.client("s3")
        client.put_object(Bucket=BUCKET, Key=NAME, Body=FIRST)
        yield client


class Watch:
    """Notes how much of a file is here after each block; `act` is called with it."""

    def __init__(self, act: Callable[[int], object] = lambda done: None) -> None:
        self.done: list[int] = []
        self._act = act

    def __call__(self, name: str, done: int, total: int) -> None:
        assert (Path(name).name, 0 < done <= total) == ("all_tool_use.json", True)
        self.done.append(done)
        self._act(done)


def fetch(url: str = URL, report: Watch | None = None) -> Fetched:
    return fetch_source(url, report or Watch())


def only(fetched: Fetched) -> bytes:
    (file,) = fetched.files
    return file.data


def test_a_file_is_fetched_in_blocks_and_a_second_time_not_at_all(s3: Any) -> None:
    first, second = Watch(), Watch()
    assert only(fetch(report=first)) == FIRST
    assert first.done == [*range(BLOCK, LENGTH, BLOCK), LENGTH]
    assert only(fetch(report=second)) == FIRST
    assert second.done == []


def test_a_version_id_is_recorded_or_the_etag_without_one(s3: Any) -> None:
    tag = s3.head_object(Bucket=BUCKET, Key=NAME)["ETag"].strip('"')
    assert fetch().to_dict()["version"] == f"ETag {tag}"
    settings = {"Status": "Enabled"}
    s3.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration=settings)
    made = s3.put_object(Bucket=BUCKET, Key=NAME, Body=SECOND)["VersionId"]
    found = fetch()
    assert (found.to_dict()["version"], only(found)) == (f"VersionId {made}", SECOND)


def stop_at(size: int) -> Watch:
    def act(done: int) -> None:
        if done >= size:
            raise KeyboardInterrupt

    return Watch(act)


def test_an_interrupted_download_goes_on_and_one_of_a_changed_file_starts_again(s3: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        fetch(report=stop_at(3 * BLOCK))
    rest = Watch()
    assert only(fetch(report=rest)) == FIRST
    assert rest.done[0] == 4 * BLOCK
    s3.put_object(Bucket=BUCKET, Key=NAME, Body=SECOND)
    with pytest.raises(KeyboardInterrupt):
        fetch(report=stop_at(3 * BLOCK))
    s3.put_object(Bucket=BUCKET, Key=NAME, Body=content(102))
    again = Watch()
    assert only(fetch(report=again)) == content(102)
    assert again.done[0] == BLOCK


KILLED = """
import os, signal, sys
from flotilla_reading.data.adapters import store_files
from flotilla_reading.data.sources import fetch_source
store_files._BLOCK = 1000
def report(name, done, total):
    if done >= 3000:
        os.kill(os.getpid(), signal.SIGKILL)
fetch_source(sys.argv[1], report)
"""


def test_a_killed_download_goes_on_in_the_next_process(s3: Any) -> None:
    path = {"PYTHONPATH": f"{ROOT}:{ROOT}/gen"}
    done = subprocess.run([sys.executable, "-c", KILLED, URL], env={**os.environ, **path})
    assert done.returncode == -signal.SIGKILL
    rest = Watch()
    assert only(fetch(report=rest)) == FIRST
    assert rest.done[0] == 4 * BLOCK


def test_a_file_that_changes_under_a_download_is_never_mixed(s3: Any, tmp_path: Path) -> None:
    local = tmp_path / "all_tool_use.json"
    local.write_bytes(FIRST)

    def change_s3(done: int) -> None:
        if done == 2 * BLOCK and len(watch.done) == 2:
            s3.put_object(Bucket=BUCKET, Key=NAME, Body=SECOND)

    def change_local(done: int) -> None:
        if done == 2 * BLOCK and len(watch.done) == 2:
            local.write_bytes(SECOND)

    for url, change in ((URL, change_s3), (f"file://{local}", change_local)):
        watch = Watch(change)
        assert only(fetch(url, watch)) == SECOND
        # Two blocks of the first; then all of the second.
        assert watch.done.count(2 * BLOCK) == 2


def test_a_file_that_never_stays_the_same_is_given_up(s3: Any) -> None:
    sizes = iter(range(200, 300))

    def change(done: int) -> None:
        if done == 2 * BLOCK:
            s3.put_object(Bucket=BUCKET, Key=NAME, Body=content(next(sizes)))

    with pytest.raises(DataError, match="was changed 3 times while it was fetched"):
        fetch(report=Watch(change))


def test_a_pattern_names_several_files_whose_rows_say_which(s3: Any) -> None:
    s3.put_object(Bucket=BUCKET, Key="v4/a/1.jsonl", Body=json.dumps(make_rows({"shop": 1})[0]))
    s3.put_object(Bucket=BUCKET, Key="v4/b/2.jsonl", Body=b'{"prompt": "x"}')
    found = fetch_source(f"s3://{BUCKET}/v4/*/*.jsonl", lambda *_: None)
    rows = list(found.read_rows())
    assert [row.place for row in rows] == ["a/1.jsonl: line 1", "b/2.jsonl: line 1"]
    about = found.to_dict()
    assert about["files"]["a/1.jsonl"]["version"].startswith("ETag ")
    assert about["sha256"] not in {each["sha256"] for each in about["files"].values()}
    with pytest.raises(DataError, match=r"\*\.csv: no file matches"):
        fetch(f"s3://{BUCKET}/v4/*.csv")


def test_what_a_store_lacks_is_named(s3: Any) -> None:
    with pytest.raises(DataError, match=rf"s3://{BUCKET}/nowhere does not exist"):
        fetch(f"s3://{BUCKET}/nowhere")
    with pytest.raises(DataError, match="is a folder: name a file in it"):
        fetch(f"s3://{BUCKET}/v4")
    with pytest.raises(DataError, match=r"nosuch://x: .*nosuch"):
        fetch("nosuch://x")


def test_a_server_that_does_not_answer_is_no_missing_file() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/tasks.json"
        with pytest.raises(DataError, match=f"{url} cannot be reached: .*Connect call failed"):
            fetch(url)


def test_a_missing_and_a_wrong_key_name_the_variable(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    httpx.post(f"{endpoint}/moto-api/reset-auth", content="0").raise_for_status()
    try:
        with pytest.raises(DataError, match=f"{URL}: .*; check AWS_ACCESS_KEY_ID"):
            fetch()
    finally:
        httpx.post(f"{endpoint}/moto-api/reset-auth", content="inf")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(DataError, match="; set AWS_ACCESS_KEY_ID or AWS_PROFILE"):
        fetch()
    monkeypatch.setenv("AWS_PROFILE", "nobodys")
    with pytest.raises(DataError, match=r"nobodys.*; check AWS_PROFILE"):
        fetch()


def test_a_store_that_tells_no_version_is_asked_each_time(
    s3: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: Any = fsspec.filesystem("memory")
    monkeypatch.setattr(store_files, "_TIMES", ())
    for data in (FIRST, SECOND):
        files.pipe_file("/tasks.json", data)
        found = fetch("memory://tasks.json")
        assert (only(found), "version" in found.to_dict()) == (data, False)


def test_a_url_is_recorded_and_shown_without_its_secrets(s3: Any) -> None:
    signed = boto3.client("s3").generate_presigned_url(
        "get_object", Params={"Bucket": BUCKET, "Key": NAME}
    )
    plain, _, query = signed.partition("?")
    found = fetch(signed)
    assert (found.to_dict()["url"], only(found)) == (plain, FIRST)
    with pytest.raises(DataError, match=f"{plain}x") as missing:
        fetch(f"{plain}x?{query}")
    assert query not in str(missing.value)
