"""Output of `flotilla logs`: formatted for people on a terminal, JSON for programs."""

import json
from typing import Any

from flotilla_common.telemetry.log import format_event
from flotilla_common.text.printable_text import print_json
from flotilla_launcher.cli.terminal import Terminal

_STYLES = {"warning": "yellow", "error": "red", "critical": "bold red"}


class LogPrinter:
    """Printer of log lines. `as_json`: one JSON object a line, which is the default in a pipe."""

    def __init__(self, *, as_json: bool) -> None:
        self._console = Terminal()
        self._as_json = as_json or not self._console.is_terminal

    def print_line(self, source: str, text: str) -> None:
        """Print a line of the log `source`. It may not be JSON: libraries and tracebacks write
        plain lines."""
        event = _parse_event(text)
        if self._as_json:
            line = {"source": source, **(event or {"event": text})}
            # The name of the log overrides a key of the line.
            line["source"] = source
            print_json(line)
            return
        shown = text if event is None else format_event(event)
        self._console.print(
            f"{source:14} {shown}",
            style=None if event is None else _STYLES.get(str(event.get("level"))),
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _parse_event(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
