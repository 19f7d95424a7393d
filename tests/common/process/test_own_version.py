"""The version and commit that a run's files name: from git in a checkout, recorded in a wheel."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from flotilla_common.process import own_version
from flotilla_common.process.own_version import UNKNOWN, OwnVersion, commit_of_checkout
from tests.support.repository import ROOT


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t")
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "file").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_a_checkout_names_its_commit_and_whether_files_have_changed(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    assert commit_of_checkout(checkout) == commit
    (checkout / "file").write_text("2")
    assert commit_of_checkout(checkout) == f"{commit}-dirty"


def test_a_folder_without_git_is_of_an_unknown_commit(tmp_path: Path) -> None:
    assert commit_of_checkout(tmp_path) == UNKNOWN
    (tmp_path / ".git").mkdir()
    assert commit_of_checkout(tmp_path) == UNKNOWN


def test_a_program_in_a_checkout_is_of_its_commit() -> None:
    assert own_version.own_version().commit == commit_of_checkout(ROOT)


def test_a_wheel_names_the_commit_that_it_was_built_from(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT / "services/common", check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = archive.read("flotilla_common/commit.txt").decode().strip()
    assert found == commit_of_checkout(ROOT)


def test_a_recorded_commit_goes_before_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "commit.txt").write_text("abc\n")
    monkeypatch.setattr(own_version, "__file__", str(tmp_path / "process" / "own_version.py"))
    own_version.own_version.cache_clear()
    try:
        assert own_version.own_version().commit == "abc"
    finally:
        own_version.own_version.cache_clear()
    assert str(OwnVersion("1.2", "abc")) == "flotilla 1.2 (commit abc)"
