"""`flotilla export --push`: a run's model and its card, at a hub that is a real server."""

import json
import re
import shutil
import sqlite3
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants
from typer.testing import CliRunner

from flotilla_launcher.cli.app import app
from tests.launcher.cli.test_report import write_run
from tests.reading.inspector.made_runs import run_apart
from tests.support.upload_hub import WRITER, UploadHub, upload_hub

# The hub's client itself calls httpx so.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

WEIGHTS = {"model-00001.safetensors": b"one", "model-00002.safetensors": b"two" * 99}
FILES = {"config.json": b"{}", "SHA256SUMS": b"", **WEIGHTS}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with a completed one, whose model stands for its checkpoint of step 3."""
    runs = tmp_path_factory.mktemp("push") / "runs"
    run_apart(write_run(runs, "demo-1", 1e-5, 1.0))
    add_model(runs / "demo-1", 3)
    return runs


def add_model(run: Path, step: int) -> None:
    checkpoint = run / f"checkpoints/step-{step:06d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    with closing(sqlite3.connect(run / "journal.sqlite", isolation_level=None)) as db:
        columns = [row[1] for row in db.execute("PRAGMA table_info(checkpoints)")]
        known = {"step": step, "directory": str(checkpoint)}
        values = [known.get(column, 0) for column in columns]
        db.execute(f"INSERT INTO checkpoints VALUES ({','.join('?' * len(values))})", values)
    (run / "model").mkdir()
    for name, content in FILES.items():
        (run / "model" / name).write_bytes(content)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Generator[UploadHub]:
    with upload_hub() as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.endpoint)
        # The other way of the client to send large files needs a service that has no open protocol.
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", WRITER)
        yield served


def export(runs: Path, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["export", "demo-1", *words, "--runs", str(runs)])
    return result.exit_code, result.output


def test_a_model_is_published_with_its_spec_and_a_card_of_its_results(
    made: Path, hub: UploadHub
) -> None:
    words = ("--license", "apache-2.0", "--base-model", "Qwen/Qwen3-4B", "--private")
    code, shown = export(made, "--push", "me/agent", *words, "--revision", "night/1")
    assert code == 0, shown
    assert f"{hub.endpoint}/me/agent/commit/" in shown
    files = hub.repos["me/agent"]["night/1"]
    assert (hub.repos["me/agent"]["main"], hub.private["me/agent"]) == ({}, True)
    assert {name: files[name] for name in FILES} == FILES
    assert files.keys() - FILES.keys() == {"README.md", "demo-1.json"}
    assert json.loads(files["demo-1.json"])["learner"]["optimizer"] == {"lr": 1e-5}
    _, head, page = files["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(head) == {
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["flotilla", "reinforcement-learning", "tool-use"],
        "base_model": "Qwen/Qwen3-4B",
    }
    assert "75.0% \\[65.0%, 85.0%\\]" in page
    assert "| demo-1: step 3 against step 0 | 4 | +1.000" in page
    assert "    flotilla train demo-1.json" in page
    assert "commit " + "ab" * 20 in page
    # The values of keys that name secrets are in neither, and a hostile name is text.
    assert "canary-key" not in page + files["demo-1.json"].decode()
    assert "<script>" not in page.split("## Spec of")[0]


def test_a_push_that_was_cut_off_goes_on_and_one_that_is_done_commits_nothing(
    made: Path, hub: UploadHub
) -> None:
    hub.accepted = 1
    code, shown = export(made, "--push", "me/agent")
    assert (code, len(hub.puts), hub.commits) == (1, 1, []), shown
    assert "the same command goes on" in shown
    hub.accepted = 2
    code, shown = export(made, "--push", "me/agent")
    # The first file is not sent again: the hub would have refused a third.
    assert (code, len(set(hub.puts)), len(hub.puts)) == (0, 2, 2), shown
    (committed,) = hub.commits
    assert set(committed) == {*FILES, "README.md", "demo-1.json"}
    assert export(made, "--push", "me/agent")[0] == 0
    assert (len(hub.puts), hub.commits) == (2, [committed])


def test_a_dry_run_shows_the_card_and_reaches_no_hub(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    code, shown = export(made, "--push", "me/agent", "--dry-run")
    assert code == 0, shown
    assert re.search(r"297 bytes  model-00002.safetensors", shown)
    assert 'license: "unknown"' in shown
    assert "## Evaluations on heldout" in shown


def test_what_cannot_be_published_is_refused_with_what_to_do(
    made: Path, hub: UploadHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(*words: str) -> str:
        code, shown = export(made, *words)
        assert code != 0
        return shown

    assert "write OWNER/NAME" in refusal("--push", "agent")
    assert "no checkpoint of step 2; it has 3" in refusal("--push", "me/agent", "--step", "2")
    assert "--out DIR or --push" in refusal()
    assert "it needs --push" in refusal("--out", "x", "--private")
    assert export(made, "--push", "me/agent")[0] == 0
    assert "exists and is public" in refusal("--push", "me/agent", "--private")
    monkeypatch.setenv("HF_TOKEN", "hf_reads_only_0123456789")
    shown = refusal("--push", "me/other")
    assert "HF_TOKEN may not write there" in shown
    assert "hf_reads_only" not in shown


def test_a_card_leaves_out_what_came_after_its_checkpoint(made: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(made, runs)
    with closing(sqlite3.connect(runs / "demo-1/journal.sqlite", isolation_level=None)) as db:
        db.execute("UPDATE checkpoints SET step = 2")
    code, shown = export(runs, "--push", "me/agent", "--dry-run")
    assert code == 0, shown
    assert "# demo-1, step 2" in shown
    assert "25.0%" in shown
    assert "75.0%" not in shown
