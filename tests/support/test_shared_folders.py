"""A folder is filled once, whole, by the first that requests it, and stays as it was."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.shared_folders import SharedFolders


def fill(path: Path) -> None:
    path.mkdir()
    (path / "a.txt").write_text("a")


def test_of_many_simultaneous_users_one_fills_a_folder_and_all_see_it_whole(tmp_path: Path) -> None:
    filled: list[Path] = []

    def use(_: int) -> list[str]:
        folder = SharedFolders(tmp_path).filled_by(lambda p: (filled.append(p), fill(p)), "model")
        return [path.name for path in folder.iterdir()]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(use, range(8))) == [["a.txt"]] * 8
    assert len(filled) == 1


def test_what_a_failed_attempt_left_is_never_taken_for_the_folder(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        fill(path)
        raise RuntimeError("no space left")

    folders = SharedFolders(tmp_path)
    with pytest.raises(RuntimeError, match="no space left"):
        folders.filled_by(fail, "model")
    assert (folders.filled_by(fill, "model") / "a.txt").read_text() == "a"


def test_a_test_that_changes_a_folder_instead_of_a_copy_is_noticed(tmp_path: Path) -> None:
    folders = SharedFolders(tmp_path)
    folder = folders.filled_by(fill, "model")
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "b.txt").write_text("b")
    folders.check_unchanged()
    (folder / "b.txt").write_text("b")
    with pytest.raises(AssertionError, match="a test has changed"):
        folders.check_unchanged()
