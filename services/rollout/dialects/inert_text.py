"""Data in which nothing reads as the structure of a conversation."""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from services.rollout.types import Tool

# A tag as templates write around what tools answer.
_TAG = re.compile(r"</?[A-Za-z_|\uff5c][^<>\s]{0,60}>")

# Toolboxes whose schemas are kept: those of so many attempts at once.
MOST_SCHEMAS = 256


class InertText:
    """Breaks up what an environment says wherever it spells a control token or a template's tag.

    Data cannot end a turn, start one, or close the frame that a template puts around it."""

    def __init__(self, marks: Iterable[str]) -> None:
        # By identity, with the tools themselves, whose ids are then not given out again.
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
        """Return the schemas as chat templates take them: tools are an environment's words too."""
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
