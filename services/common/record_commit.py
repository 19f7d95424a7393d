"""Build hook of hatchling: records the commit in what it builds, for `flotilla --version`.

The commit is git's, or FLOTILLA_COMMIT where a build has no repository, as in an image."""

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_RECORDED = "flotilla_common/commit.txt"


class RecordCommit(BuildHookInterface[Any]):
    """Adds a file with the commit to wheels and source archives; an editable install asks git."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # A source archive brings its own.
        if version == "editable" or (Path(self.root) / _RECORDED).exists():
            return
        folder = Path(tempfile.mkdtemp())
        (folder / "commit.txt").write_text(self._find_commit() + "\n", encoding="utf-8")
        build_data["force_include"][str(folder / "commit.txt")] = _RECORDED

    def _find_commit(self) -> str:
        if named := os.environ.get("FLOTILLA_COMMIT", ""):
            return named
        # Not the repository of another project, in which a source archive was unpacked.
        if not (Path(self.root).parents[1] / ".git").exists():
            return "unknown"
        command = ["git", "-C", self.root, "describe"]
        command += ["--always", "--dirty", "--abbrev=40", "--exclude=*"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        return found.stdout.strip() or "unknown"
