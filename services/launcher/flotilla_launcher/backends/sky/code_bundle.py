"""Code that a run's machines get: one commit, exported once, the same for every replica."""

import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flotilla_common.process.child_environment import child_environment
from flotilla_launcher.backends.sky import input_files
from flotilla_launcher.backends.sky.machine_script import SPEC_FILE
from flotilla_launcher.run_spec import RunSpec

CODE_FOLDER = "code"
_MARK = ".commit"
_HASH = re.compile(r"[0-9a-f]{7,40}")
# SkyPilot skips the files in .gitignore unless this file exists.
_IGNORE = ".skyignore"


class CodeError(Exception):
    """The code cannot be pinned; the message gives the fix."""


def pin_code(run_dir: Path, root: Path, spec: RunSpec) -> Path:
    """Return the folder with the code of a run, exported now or when its first replica was started.

    `root` is the working tree of this launcher. A commit that the spec names by a name that moves,
    as HEAD does, is resolved once. Raises CodeError."""
    folder, commit = run_dir / CODE_FOLDER, spec.config.sky.commit
    known = read_pinned_commit(run_dir)
    if known is None:
        if commit is None:
            _refuse_dirty(root)
        known = _resolve_commit(root, commit)
        _export_commit(root, known, folder)
    elif commit is not None and _HASH.fullmatch(commit) and not known.startswith(commit):
        raise CodeError(
            f"launcher.sky.commit: run {run_dir.name} has begun with {known}, not with {commit};"
            " its replicas must all run the same code, so leave it out or start a new run"
        )
    (folder / SPEC_FILE).write_text(spec.text, encoding="utf-8")
    _copy_inputs(spec.tables, root, folder)
    return folder


def _copy_inputs(spec: Mapping[str, Any], root: Path, folder: Path) -> None:
    keys, missing = input_files.key_by_input(spec), input_files.copy_inputs(spec, root, folder)
    files = [
        f"{keys[name]}: {root / name} is not there"
        for name in missing
        # The machines fetch a model of the hub themselves.
        if keys[name] != "policy.model" or input_files.must_be_file(name, spec, root)
    ]
    if files:
        raise CodeError(
            "\n".join(files) + "\nso machines would not get it; have a [[prepare]] command of the"
            " spec make it, make it where the launcher is, or write an absolute path if the"
            " machines have it themselves"
        )


def read_pinned_commit(run_dir: Path) -> str | None:
    """Return the commit that a run was begun with; None before that."""
    mark = run_dir / CODE_FOLDER / _MARK
    return mark.read_text().strip() if mark.exists() else None


def _resolve_commit(root: Path, name: str | None) -> str:
    what = name or "HEAD"
    found = _run_git(root, "rev-parse", "--verify", "--quiet", f"{what}^{{commit}}")
    if found.returncode != 0:
        raise CodeError(
            f"{root} has no commit {what!r}; machines get the code of a commit, so set"
            " launcher.sky.commit to one that is here, or run flotilla in its repository"
        )
    return found.stdout.strip()


def _refuse_dirty(root: Path) -> None:
    changed = _run_git(root, "status", "--porcelain").stdout.splitlines()
    if not changed:
        return
    shown = ", ".join(line[3:] for line in changed[:5])
    more = f" and {len(changed) - 5} more" if len(changed) > 5 else ""
    raise CodeError(
        f"{root} has changes that no commit holds ({shown}{more}), so machines would not get them;"
        ' commit them, or set launcher.sky.commit = "HEAD" to leave them out'
    )


def _export_commit(root: Path, commit: str, folder: Path) -> None:
    """Export the commit, all or nothing: the folder appears under its name once it is whole."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".code-") as scratch:
        archive, tree = Path(scratch) / "code.tar", Path(scratch) / CODE_FOLDER
        done = _run_git(root, "archive", "--format=tar", f"--output={archive}", commit)
        if done.returncode != 0:
            raise CodeError(f"git archive {commit} failed in {root}: {done.stderr.strip()}")
        with tarfile.open(archive) as tar:
            tar.extractall(tree, filter="data")
        (tree / _MARK).write_text(f"{commit}\n")
        (tree / _IGNORE).touch()
        shutil.move(tree, folder)


def _run_git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ("git", "-C", str(root), *arguments),
            check=False,
            capture_output=True,
            text=True,
            env=child_environment(),
        )
    except OSError as error:
        raise CodeError(f"cannot run git: {error}; machines get the code of a commit") from error
