"""The code that a run's machines get."""

import subprocess
from pathlib import Path

import pytest

from flotilla_launcher.backends.sky.code_bundle import CodeError, pin_code, read_pinned_commit
from tests.support.run_specs import bare_spec
from tests.support.sky_launches import config


def _git(root: Path, *arguments: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    done = subprocess.run(
        ("git", "-C", str(root), *who, *arguments), check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    root.mkdir()
    _git(root, "init", "--quiet")
    (root / "main.py").write_text("first\n")
    (root / "run.sh").write_text("#!/bin/bash\n")
    (root / "run.sh").chmod(0o755)
    _git(root, "add", ".")
    _git(root, "commit", "--quiet", "-m", "first")
    return root


def test_a_runs_code_is_the_commit_of_its_first_replica_for_ever(
    root: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "runs/run-1"
    code = pin_code(run_dir, root, bare_spec({"name": "x"}))
    first = _git(root, "rev-parse", "HEAD")
    assert read_pinned_commit(run_dir) == first
    assert (code / "main.py").read_text() == "first\n"
    assert (code / "spec.json").read_text() == '{"name":"x"}'
    assert (code / "run.sh").stat().st_mode & 0o111
    assert not (code / ".git").exists()
    (root / "main.py").write_text("second\n")
    _git(root, "commit", "--quiet", "--all", "-m", "second")
    (root / "main.py").write_text("unfinished\n")
    again = pin_code(run_dir, root, bare_spec({}))
    assert again == code and (code / "main.py").read_text() == "first\n"
    assert read_pinned_commit(run_dir) == first


def test_changes_that_no_commit_holds_are_refused_unless_left_out(
    root: Path, tmp_path: Path
) -> None:
    (root / "main.py").write_text("unfinished\n")
    (root / "new.py").write_text("")
    with pytest.raises(CodeError, match=r"main\.py, new\.py.*launcher\.sky\.commit = \"HEAD\""):
        pin_code(tmp_path / "run-1", root, bare_spec({}))
    assert not (tmp_path / "run-1" / "code").exists()
    code = pin_code(tmp_path / "run-1", root, bare_spec({}, config(commit="HEAD")))
    assert (code / "main.py").read_text() == "first\n"


def test_an_unknown_commit_and_a_change_of_commit_are_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(CodeError, match="has no commit 'abc123'"):
        pin_code(tmp_path / "run-1", root, bare_spec({}, config(commit="abc123")))
    pin_code(tmp_path / "run-1", root, bare_spec({}))
    first = _git(root, "rev-parse", "HEAD")
    (root / "main.py").write_text("second\n")
    _git(root, "commit", "--quiet", "--all", "-m", "second")
    with pytest.raises(CodeError, match=f"has begun with {first}"):
        newer = _git(root, "rev-parse", "HEAD")
        pin_code(tmp_path / "run-1", root, bare_spec({}, config(commit=newer)))
    for same in (first[:8], "HEAD"):
        pin_code(tmp_path / "run-1", root, bare_spec({}, config(commit=same)))
        assert read_pinned_commit(tmp_path / "run-1") == first


def test_a_folder_without_history_has_no_code_to_pin(tmp_path: Path) -> None:
    with pytest.raises(CodeError, match="run flotilla in its repository"):
        pin_code(tmp_path / "run-1", tmp_path, bare_spec({}))
