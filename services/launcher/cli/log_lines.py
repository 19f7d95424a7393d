"""How `flotilla logs` prints a line: for people on a terminal, as JSON for programs."""

import json
from typing import Any

from services.common.log import readable
from services.common.text import say_json
from services.launcher.cli.terminal import Terminal

_STYLES = {"warning": "yellow", "error": "red", "critical": "bold red"}


class LogPrinter:
    """Prints lines as they come. `as_json`: one object a line, in a pipe too."""

    def __init__(self, *, as_json: bool) -> None:
        self._console = Terminal()
        self._as_json = as_json or not self._console.is_terminal

    def line(self, source: str, text: str) -> None:
        """Print what the log `source` holds; a line that is no JSON comes from a library, or is
        part of a traceback."""
        event = _event(text)
        if self._as_json:
            told = {"source": source, **(event or {"event": text})}
            # The log that it stands in, whatever the line says.
            told["source"] = source
            say_json(told)
            return
        shown = text if event is None else readable(event)
        self._console.print(
            f"{source:14} {shown}",
            style=None if event is None else _STYLES.get(str(event.get("level"))),
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _event(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
