"""Files that hold one JSON object."""

import json
from pathlib import Path
from typing import Any


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a file. Raises ValueError, which names the path and the fault."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not a JSON object")  # noqa: TRY004
    return found
