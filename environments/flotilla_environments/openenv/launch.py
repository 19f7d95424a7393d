"""Search for an interpreter with openenv, which cannot share an environment with mcp 2."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_PYTHON = _ROOT.parent / ".venv-openenv" / "bin" / "python"


class NotInstalledError(Exception):
    """The openenv package is missing; the message names the fix."""


def ensure_openenv(argv: Sequence[str]) -> None:
    """Return if openenv can be imported; else become `flotilla_environments.serve` under an
    interpreter that has it. Raises `NotInstalledError`."""
    if importlib.util.find_spec("openenv") is not None:
        return
    if not _PYTHON.exists() or Path(sys.prefix).resolve() == _PYTHON.parents[1].resolve():
        raise NotInstalledError(
            "--openenv needs the openenv package, which cannot be installed beside mcp 2: run "
            '`make openenv`, or `uv pip install "./environments[openenv]"` into an environment of '
            "its own"
        )
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    command = [str(_PYTHON), "-P", "-m", "flotilla_environments.serve", *argv]
    os.execve(_PYTHON, command, {**os.environ, "PYTHONPATH": path})
