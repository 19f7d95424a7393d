"""Models come from a hub if access and disk space allow, and at the requested commit; an error
names the obstacle and its fix."""

import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.support.model_hub import FIRST, SECOND, TOKEN, ModelHub, model_hub
from tests.support.repository import ROOT

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"w" * 100_000,
    "pytorch_model.bin": b"pickle",
    "original/consolidated.safetensors": b"twice",
}


@pytest.fixture
def hub() -> Generator[ModelHub]:
    with model_hub(ModelHub({FIRST: FILES, SECOND: {"config.json": b"{ }"}})) as served:
        yield served


def run(hub: ModelHub, folder: Path, code: str, **environ: str) -> list[str]:
    """Lines that some code prints in a process of its own: the hub's client reads where its hub is
    once."""
    top = (
        "from flotilla_common.adapters.model_hub import *\n"
        "from flotilla_common.rpc.errors import *\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{top}{code}"],
        env={"PATH": "", "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(folder), **environ},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60.0,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


REFUSED = """
for fetch in (look_up_model, stage_model):
    try:
        print(fetch("org/model"))
    except ModelUnavailableError as error:
        print(error.refused, error)
"""


def test_a_model_is_staged_once_and_only_with_what_runs_read(hub: ModelHub, tmp_path: Path) -> None:
    code = """
before = look_up_model("org/model", "main")
folder = stage_model("org/model", before.commit)
print(sorted(path.name for path in folder.iterdir()))
print(folder.name, before.size, before.missing, look_up_model("org/model").missing)
"""
    *logged, files, counted = run(hub, tmp_path, code)
    assert files == "['config.json', 'model.safetensors']"
    assert counted == f"{FIRST} 100002 100002 0"
    assert "downloading model" in logged[0] and FIRST in logged[0]
    assert "model downloaded" in logged[-1]
    fetched = [line for line in hub.requests if line.startswith("GET /org/model/resolve/")]
    assert len(fetched) == 2


def test_a_commit_that_is_here_needs_no_hub_and_a_branch_keeps_its_last_one(
    hub: ModelHub, tmp_path: Path
) -> None:
    run(hub, tmp_path, 'stage_model("org/model")')
    hub.branches["main"] = SECOND
    offline = f'print(stage_model("org/model", "{FIRST}").name, stage_model("org/model").name)'
    assert run(hub, tmp_path, offline, HF_HUB_OFFLINE="1") == [f"{FIRST} {FIRST}"]
    assert run(hub, tmp_path, 'print(look_up_model("org/model").commit)') == [SECOND]


def test_a_gated_model_names_the_page_and_the_variable(hub: ModelHub, tmp_path: Path) -> None:
    hub.gated = True
    page = f"{hub.endpoint}/org/model"
    output = (
        f"True policy.model: org/model is gated, and HF_TOKEN is not set: accept its licence on"
        f" {page}, and set HF_TOKEN to a token of the account that did"
    )
    other = (
        "True policy.model: org/model is gated, and the account of HF_TOKEN may not read it:"
        f" accept its licence on {page}"
    )
    code = f"""
import os
{REFUSED}
os.environ["HF_TOKEN"] = "hf_other"
{REFUSED}
os.environ["HF_TOKEN"] = "{TOKEN}"
check_access("org/model")
print(look_up_model("org/model").commit)
"""
    assert run(hub, tmp_path, code) == [output, output, other, other, FIRST]


def test_a_model_larger_than_the_disk_is_not_begun(hub: ModelHub, tmp_path: Path) -> None:
    hub.reported_sizes["model.safetensors"] = 2**60
    code = REFUSED.replace("(look_up_model, stage_model)", "(stage_model,)")
    (output,) = run(hub, tmp_path, code)
    assert output.startswith("False policy.model: org/model takes 1073741824.0 GiB more in ")
    assert f"{tmp_path}/hub" in output
    assert output.endswith("free there: free some, or set HF_HOME to a folder on a larger disk")
    assert not [line for line in hub.requests if line.startswith("GET /org/model/resolve/")]


def test_other_models_and_revisions_are_refused_by_their_keys(
    hub: ModelHub, tmp_path: Path
) -> None:
    code = """
for model, revision in (("org/other", None), ("org/model", "gone"), ("no such/id", None)):
    try:
        stage_model(model, revision)
    except ModelUnavailableError as error:
        print(error.refused, error)
"""
    other, gone, bad = run(hub, tmp_path, code)
    assert other.startswith("True policy.model: org/other is neither a folder here nor a model on")
    assert other.endswith("correct it, or set HF_TOKEN for a private one")
    assert gone == f"True policy.revision: {hub.endpoint}/org/model has no revision 'gone'"
    assert bad.startswith("True policy.model: no such/id is neither a folder here nor a model")


def test_a_hub_that_is_away_is_no_refusal(tmp_path: Path) -> None:
    away = ModelHub({}, endpoint="http://127.0.0.1:9")
    look, stage = run(away, tmp_path, REFUSED)
    for output in (look, stage):
        assert output.startswith(
            "False policy.model: org/model is neither a folder here nor a model"
        )
        assert "can be reached" in output
