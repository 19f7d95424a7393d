"""A manifest names files of its own folder, and no others."""

import hashlib
import json
from pathlib import Path

import pytest

from services.learner.checkpoints.manifest import (
    FORMAT,
    MANIFEST,
    DamagedCheckpointError,
    parse_manifest,
    verify,
)

CONTENT = b"weights"


def manifest(*names: str) -> str:
    entry = {"sha256": hashlib.sha256(CONTENT).hexdigest(), "bytes": len(CONTENT)}
    fields = {"format": FORMAT, "run_id": "run", "run_epoch": 1, "step": 2}
    return json.dumps({**fields, "files": dict.fromkeys(names, entry)})


@pytest.mark.parametrize(
    "name",
    [
        *("../model.safetensors", "a/../../b", "..", ".", "", "/etc/passwd", "a/./b", "a//b"),
        *("a\0b", "./a", "a/"),
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(DamagedCheckpointError, match="is no name of a file below its folder"):
        parse_manifest(manifest(name), "manifest.json")


def test_names_below_the_folder_are_taken() -> None:
    names = {"model.safetensors", "a/b.json", "..a"}
    assert parse_manifest(manifest(*names), "manifest.json").files.keys() == names


@pytest.mark.parametrize("linked", ["model.safetensors", "folder"])
def test_a_link_out_of_the_folder_is_no_file_of_it(tmp_path: Path, linked: str) -> None:
    elsewhere, checkpoint = tmp_path / "elsewhere", tmp_path / "checkpoint"
    elsewhere.mkdir()
    checkpoint.mkdir()
    (elsewhere / "model.safetensors").write_bytes(CONTENT)
    target = elsewhere if linked == "folder" else elsewhere / "model.safetensors"
    (checkpoint / linked).symlink_to(target)
    name = "folder/model.safetensors" if linked == "folder" else linked
    (checkpoint / MANIFEST).write_text(manifest(name))
    with pytest.raises(DamagedCheckpointError, match="is a link to elsewhere"):
        verify(checkpoint)


def test_the_folder_itself_may_be_reached_by_a_link(tmp_path: Path) -> None:
    checkpoint, link = tmp_path / "checkpoint", tmp_path / "link"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(CONTENT)
    (checkpoint / MANIFEST).write_text(manifest("model.safetensors"))
    link.symlink_to(checkpoint)
    assert verify(link).step == 2
