"""Files of demonstrations: conversations that passed, as rows that `flotilla sft --from` reads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flotilla_common.files.durable_files import replace_file
from flotilla_common.run_folder.dump_files import json_line
from flotilla_reading.data.collect.recorded_episodes import Messages, read_episodes, to_message


def demonstration_row(
    key: str, messages: Messages, tools: Messages | None, reward: float | None
) -> dict[str, Any]:
    """Return the row of a conversation. Tools are JSON text, as in other exports: their schemas
    differ, and a column has one type."""
    said = [to_message(each, number) for number, each in enumerate(messages)]
    return {"key": key, "messages": said, "tools": json.dumps(tools or []), "reward": reward}


class DemonstrationsFile:
    """A file to which conversations are added. It is replaced as a whole, so that it never ends in
    half a row; `keys` are the tasks that it has."""

    def __init__(self, path: Path) -> None:
        """Raises DataError if there is a file that has other content."""
        self.path = path
        rows = list(read_episodes(path)) if path.exists() else []
        self.keys = {row.key for row in rows}

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row, durably."""
        before = self.path.read_bytes() if self.path.exists() else b""
        if before and not before.endswith(b"\n"):
            before += b"\n"
        replace_file(self.path, before + json_line(row))
        self.keys.add(str(row["key"]))
