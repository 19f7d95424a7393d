"""What every page is: a template, its values, and the path to it."""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Page:
    """A page to render: a template and its values."""

    template: str
    title: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Crumb:
    """One part of the path to a page."""

    text: str
    href: str


def embed(value: Any) -> str:
    """Return JSON that is safe within a script element: nothing in it closes the element."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
