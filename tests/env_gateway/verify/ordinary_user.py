"""A user without rights, as which root runs a program: most gateways do not run as root."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.repository import ROOT

# Used by no account, and by no sandbox of a gateway that runs as root.
_NUMBER = "63999"


def as_ordinary_user(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` so. What it needs of Python and of this repository may
    lie where only root can reach it (/root), hence another view of the files around it."""
    needed = dict.fromkeys([Path(sys.base_prefix), Path(sys.prefix), ROOT])
    behind = [path for path in needed if _barrier(path)]
    # By default, bubblewrap makes folders for its own user alone.
    folders = dict.fromkeys(
        folder for path in behind for folder in reversed(path.parents) if _barrier(folder)
    )
    return [
        *(shutil.which("bwrap") or "bwrap", "--die-with-parent", "--dev-bind", "/", "/"),
        *(word for path in folders for word in _new_folder(path)),
        *(word for path in behind for word in ("--ro-bind", str(path), str(path))),
        *("--", "setpriv", "--reuid", _NUMBER, "--regid", _NUMBER, "--clear-groups", "--"),
        *command,
    ]


def environment() -> dict[str, str]:
    """Return the environment of such a user's programs, without that of the test run."""
    return {
        "PATH": os.environ["PATH"],
        "USER": "ordinary",
        "HOME": "/nonexistent",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def _new_folder(path: Path) -> tuple[str, ...]:
    return ("--perms", "0755", "--tmpfs" if path == _barrier(path) else "--dir", str(path))


def _barrier(path: Path) -> Path | None:
    """The topmost folder on the way to `path` through which only some may go."""
    return next((at for at in reversed([path, *path.parents]) if not at.stat().st_mode & 1), None)
