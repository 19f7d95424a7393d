"""kill -9 in the middle of an upload to S3, then a new start: one checkpoint, and no leftovers."""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from flotilla_learner.checkpoints.adapters import fsspec_store
from flotilla_learner.checkpoints.adapters.fsspec_store import FsspecStore
from flotilla_learner.checkpoints.remote_restore import RestoreError, restore
from flotilla_learner.journal.schema import CheckpointRow
from tests.learner.checkpoints.upload_process import PART_BYTES
from tests.support.remote_checkpoints import UploadingMachine, manifests, query

PROGRAM = "tests.learner.checkpoints.upload_process"


@pytest.mark.parametrize(
    ("moment", "name", "whole"),
    [
        ("part", "large.bin", False),
        pytest.param("upload", "z.bin", False, marks=pytest.mark.slow),
        pytest.param("write", "manifests/", False, marks=pytest.mark.slow),
        pytest.param("drop_unfinished", "", True, marks=pytest.mark.slow),
    ],
)
async def test_what_a_kill_leaves_is_no_checkpoint_and_the_next_start_mends_it(
    s3: FsspecStore,
    endpoint: str,
    tmp_path: Path,
    moment: str,
    name: str,
    whole: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fsspec_store, "_PART_BYTES", PART_BYTES)
    prefix = s3.url.split("/")[3]
    arguments = [str(tmp_path / "run"), endpoint, prefix, moment, name]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", PROGRAM, *arguments)
    assert await process.wait() == -signal.SIGKILL
    assert manifests(s3) == (["e000001-s000020"] if whole else [])
    if not whole:
        with pytest.raises(RestoreError, match="no run has a checkpoint there"):
            restore(s3, tmp_path / "too-early", name="test")
    (found,) = query(tmp_path / "run", "SELECT step, directory, files FROM checkpoints")
    again = UploadingMachine(tmp_path / "run", s3, run_epoch=2)
    staged = again.stage(CheckpointRow(found[0], found[1], {}))
    again.uploader.upload(staged)
    assert manifests(s3) == ["e000001-s000020" if whole else "e000002-s000020"]
    folders = {n.split("/")[1] for n in s3.list_files("checkpoints")}
    assert folders == set(manifests(s3))
    assert unfinished(s3) == []
    assert restore(s3, tmp_path / "new", name="test").step == 20


def unfinished(store: FsspecStore) -> list[str]:
    files: Any = store._files  # pyright: ignore[reportPrivateUsage]
    bucket, prefix, _ = files.split_path(store._root)  # pyright: ignore[reportPrivateUsage]
    keys = [part["Key"] for part in files.list_multipart_uploads(bucket)]
    return [key for key in keys if key.startswith(f"{prefix}/")]
