"""A manifest names files of its own folder, and no others."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from flotilla_learner.run_files.checkpoint_manifest import (
    FORMAT,
    MANIFEST,
    DamagedCheckpointError,
    parse_manifest,
    verify_checkpoint,
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
        *("a\0b", "./a", "a/", "half of \ud83d", "x" * 256, "a/" * 200 + "b" * 3000),
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(DamagedCheckpointError, match="is not the name of a file below its folder"):
        parse_manifest(manifest(name), "manifest.json")


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "7", "null", "{}", "[" * 100_000, '{"format": 2, "files": []}'),
        manifest("a").replace('"step": 2', '"step": Infinity'),
        manifest("a").replace('"step": 2', f'"step": {"9" * 5000}'),
        manifest("a").replace('"bytes": 7', '"bytes": "7"'),
        manifest("a").replace('"run_id": "run"', '"run_id": 7'),
        manifest("a").replace('"bytes": 7', '"bytes": 7, "more": 1'),
    ],
)
def test_what_is_no_manifest_is_told(text: str) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json is not a manifest"):
        parse_manifest(text, "manifest.json")


@pytest.mark.parametrize("name", ["model.safetensors", MANIFEST])
def test_a_pipe_or_a_device_is_no_file_of_a_checkpoint(tmp_path: Path, name: str) -> None:
    """To open one would wait for ever for who writes."""
    if name != MANIFEST:
        (tmp_path / MANIFEST).write_text(manifest(name).replace('"bytes": 7', '"bytes": 0'))
    os.mkfifo(tmp_path / name)
    with pytest.raises(DamagedCheckpointError, match=f"{name} is not a regular file"):
        verify_checkpoint(tmp_path)


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
        verify_checkpoint(checkpoint)


def test_the_folder_itself_may_be_reached_by_a_link(tmp_path: Path) -> None:
    checkpoint, link = tmp_path / "checkpoint", tmp_path / "link"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_bytes(CONTENT)
    (checkpoint / MANIFEST).write_text(manifest("model.safetensors"))
    link.symlink_to(checkpoint)
    assert verify_checkpoint(link).step == 2
