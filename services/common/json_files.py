"""Files that hold one JSON object."""

import json
from pathlib import Path
from typing import Any


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object of a file. Raises ValueError that names the path and what is wrong."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is no JSON object")  # noqa: TRY004
    return found
