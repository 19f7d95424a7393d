"""Data sets of the hub are pinned to a commit, and errors name the key."""

import json
import os
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.reading.data.made_tasks import make_row
from tests.support.model_hub import FIRST, SECOND, TOKEN, ModelHub, model_hub
from tests.support.repository import ROOT


def lines(*keys: str) -> bytes:
    return "".join(f"{json.dumps(make_row(key))}\n" for key in keys).encode()


FILES = {
    "README.md": b"# Tasks",
    "data/train-0.jsonl": lines("a", "b"),
    "data/train-1.jsonl": lines("c"),
    "data/test-0.jsonl": lines("d"),
}


@pytest.fixture
def hub() -> Generator[ModelHub]:
    commits = {FIRST: FILES, SECOND: {"only.jsonl": lines("new")}}
    served = ModelHub(commits, {"main": FIRST, "refs/pr/1": SECOND}, kind="datasets")
    with model_hub(served):
        yield served


def prepare(hub: ModelHub, folder: Path, source: str, **environ: str) -> tuple[int, str]:
    """The hub's client reads where its hub is once, so this is a process of its own."""
    done = subprocess.run(
        [ROOT / ".venv/bin/flotilla", "data", "prepare", source, "--out", folder / "data"],
        env={
            **{"PATH": os.environ["PATH"], "PYTHONPATH": f"{ROOT}:{ROOT}/gen"},
            **{"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder / "hf"), **environ},
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "data" / "manifest.json").read_text())


@pytest.mark.parametrize(
    ("rest", "keys", "revision"),
    [
        ("/data/train-*.jsonl", {"a", "b", "c"}, FIRST),
        ("/data", {"a", "b", "c", "d"}, FIRST),
        ("@main/data/test-0.jsonl", {"d"}, FIRST),
        (f"@{SECOND}", {"new"}, SECOND),
        ("@refs%2Fpr%2F1", {"new"}, SECOND),
    ],
)
def test_files_of_a_data_set_are_prepared_and_the_commit_is_recorded(
    hub: ModelHub, tmp_path: Path, rest: str, keys: set[str], revision: str
) -> None:
    url = f"hf://datasets/org/model{rest}"
    code, output = prepare(hub, tmp_path, url)
    assert code == 0, output
    found = manifest(tmp_path)
    assert set(found["tasks"]["train"]) == keys
    source = found["source"]
    assert (source["kind"], source["url"], source["revision"]) == ("hub", url, revision)
    assert len(source["sha256"]) == 64


def test_a_commit_that_was_fetched_is_not_fetched_again(hub: ModelHub, tmp_path: Path) -> None:
    for _ in range(2):
        assert prepare(hub, tmp_path, "hf://datasets/org/model/data/test-0.jsonl")[0] == 0
    fetched = [line for line in hub.requests if line.startswith("GET /datasets/org/model/resolve/")]
    assert fetched == [f"GET /datasets/org/model/resolve/{FIRST}/data/test-0.jsonl"]


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("", "org/model has 3 files: name one, a folder, or a pattern with *: data/test-0.jsonl"),
        ("/nowhere.jsonl", "org/model has no file nowhere.jsonl; it has data/test-0.jsonl"),
        ("@v9", "/datasets/org/model has no revision 'v9'"),
        ("x", "datasets/org/modelx does not exist; if it is private, set HF_TOKEN"),
        ("//", "is not of the form hf://datasets/OWNER/NAME[@REVISION][/FILE]"),
    ],
)
def test_what_the_hub_lacks_is_named(
    hub: ModelHub, tmp_path: Path, rest: str, message: str
) -> None:
    source = "hf://datasets/org" if rest == "//" else f"hf://datasets/org/model{rest}"
    code, output = prepare(hub, tmp_path, source)
    assert (code, message in output) == (2, True), output
    assert not (tmp_path / "data").exists()


def test_a_missing_and_a_wrong_token_are_told_apart_and_never_printed(
    hub: ModelHub, tmp_path: Path
) -> None:
    hub.private = True
    source = "hf://datasets/org/model/data/test-0.jsonl"
    assert "set HF_TOKEN" in prepare(hub, tmp_path, source)[1]
    output = prepare(hub, tmp_path, source, HF_TOKEN="hf_wrong_and_long")[1]
    assert "check HF_TOKEN" in output
    assert "hf_wrong" not in output
    assert prepare(hub, tmp_path, source, HF_TOKEN=TOKEN)[0] == 0
    hub.private, hub.gated = False, True
    other = "hf://datasets/org/model/data/train-1.jsonl"
    output = prepare(hub, tmp_path, other)[1]
    assert "is gated: accept its licence there, and set HF_TOKEN" in output


def test_a_hub_that_breaks_off_leaves_no_folder_and_a_second_call_completes(
    hub: ModelHub, tmp_path: Path
) -> None:
    name = "data/test-0.jsonl"
    whole = hub.commits[FIRST][name]
    hub.reported_sizes[name] = len(whole)
    hub.commits[FIRST] = {**FILES, name: whole[:10]}
    code, output = prepare(hub, tmp_path, f"hf://datasets/org/model/{name}")
    assert (code, (tmp_path / "data").exists()) == (2, False), output
    hub.commits[FIRST] = FILES
    code, output = prepare(hub, tmp_path, f"hf://datasets/org/model/{name}")
    assert code == 0, output
    assert set(manifest(tmp_path)["tasks"]["train"]) == {"d"}
