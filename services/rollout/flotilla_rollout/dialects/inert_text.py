"""Data that cannot be read as the structure of a conversation."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from flotilla_rollout.types import Tool

# A tag that templates write around tools' answers.
_TAG = re.compile(r"</?[A-Za-z_|\uff5c][^<>\s]{0,60}>")

# Number of toolboxes with cached schemas, enough for concurrent attempts.
MOST_SCHEMAS = 256


class InertText:
    """Breaks up an environment's text where it spells a control token or a template's tag.

    Then data cannot end a turn, start one, or close the frame that a template puts around it."""

    def __init__(self, marks: Iterable[str]) -> None:
        # By identity, with the tools themselves, so that their ids are not reused.
        self._schemas: dict[int, tuple[Sequence[Tool], list[dict[str, Any]]]] = {}
        self._marks: dict[str, str] = {}
        self.add_marks(marks)

    def add_marks(self, marks: Iterable[str]) -> None:
        for mark in sorted(set(marks), key=len, reverse=True):
            if len(mark) > 1:
                self._marks[mark] = f"{mark[0]} {mark[1:]}"

    def add_tags(self, frames: Iterable[str]) -> None:
        """Add every tag in a template's own text around data."""
        self.add_marks(tag for frame in frames for tag in _TAG.findall(frame))

    def clean_text(self, text: str) -> str:
        for mark, broken in self._marks.items():
            if mark in text:
                text = text.replace(mark, broken)
        return text

    def tool_schemas(self, tools: Sequence[Tool]) -> list[dict[str, Any]]:
        """Return the schemas for chat templates: tools are an environment's text too."""
        known = self._schemas.get(id(tools))
        if known is None:
            text = json.dumps([_schema(tool) for tool in tools], ensure_ascii=False)
            known = tools, json.loads(self.clean_text(text))
            self._schemas[id(tools)] = known
            while len(self._schemas) > MOST_SCHEMAS:
                self._schemas.pop(next(iter(self._schemas)), None)
        return known[1]


def _schema(tool: Tool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
    }
    return {"type": "function", "function": function}
