"""Temporary folders whose process is killed."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from flotilla_common.files.scratch_folders import scratch_folder
from tests.support.started_process import start_process

# Prints its folder and stays alive in it; with an argument, hands the folder to a child.
KEEPER = """
import subprocess, sys, time
from flotilla_common.files.scratch_folders import scratch_folder
with scratch_folder() as (folder, keeper):
    (folder / "file").write_text("")
    if sys.argv[1:]:
        child = subprocess.Popen(["sleep", "600"], pass_fds=[keeper], stdout=subprocess.DEVNULL)
        print(child.pid, folder, flush=True)
    else:
        print(0, folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_folder_is_there_for_as_long_as_it_is_used(tmp_path: Path) -> None:
    with scratch_folder() as (folder, _):
        assert folder.parent == tmp_path and folder.is_dir()
        with scratch_folder() as (other, _):
            assert folder.is_dir() and other != folder
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(20)
def test_what_is_no_folder_of_this_user_blocks_no_caller_and_stays(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "file").write_text("mine")
    link, pipe = (tmp_path / f"flotilla-scratch-{name}" for name in ("link", "pipe"))
    link.symlink_to(mine)
    # Opening it without O_DIRECTORY would wait for a writer.
    os.mkfifo(pipe)
    with scratch_folder():
        pass
    assert link.is_symlink() and pipe.is_fifo() and (mine / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make what another owns")
def test_root_sweeps_no_folder_of_another_user(tmp_path: Path) -> None:
    theirs = tmp_path / "flotilla-scratch-theirs"
    theirs.mkdir()
    (theirs / "file").write_text("theirs")
    os.chown(theirs, 63_999, 63_999)
    with scratch_folder():
        pass
    assert (theirs / "file").exists()


def test_what_a_killed_process_has_left_goes_with_the_next_unless_a_child_works_in_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "flotilla-scratch-file").write_text("no folder of ours")
    commands = ([sys.executable, "-c", KEEPER, *words] for words in ((), ("child",)))
    running, output = zip(*map(start_process, commands), strict=True)
    (_, orphan), (child, kept) = map(str.split, output)
    with scratch_folder():
        assert Path(orphan, "file").exists(), "its process is there"
    for process in running:
        process.kill()
        process.communicate()
    with scratch_folder():
        assert not Path(orphan).exists()
        assert Path(kept, "file").exists(), "the child is there"
    subprocess.run(["kill", "-9", child], check=True)
    deadline = time.monotonic() + 20
    while Path(kept).exists() and time.monotonic() < deadline:
        with scratch_folder():
            time.sleep(0.01)
    assert not Path(kept).exists()
