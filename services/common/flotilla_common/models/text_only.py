"""Models that read images beside text, where the packages for images are not installed.

vLLM imports these packages with every such model, and uses none of them if it is given pixels."""

import os
from importlib.util import find_spec
from pathlib import Path

_STAND_INS = Path(__file__).absolute().parents[1] / "stand_ins"


def find_stand_ins() -> str | None:
    """Return the folder that vLLM's processes need on their path, if they need it."""
    return None if find_spec("torchvision") else str(_STAND_INS)


def add_to_python_path(folder: str | None) -> dict[str, str]:
    """Return the variable by which child processes also search a folder, after their own."""
    if folder is None:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), folder]))}
