"""Pages rendered by Jinja, with everything escaped."""

import json
import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from flotilla_reading.inspector import pages
from flotilla_reading.inspector.pages.links import Links
from flotilla_reading.inspector.pages.page import Page
from flotilla_reading.inspector.pages.visible_text import split_visible

_NONE = "\u2013"
PAGES = Path(pages.__file__).parent
STATIC = PAGES / "static"


class PageRenderer:
    """Renders pages with the links of one server or one file of a bundle."""

    def __init__(self) -> None:
        self._jinja = Environment(
            loader=FileSystemLoader(PAGES / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._jinja.filters.update(_FILTERS)

    def render(self, page: Page, links: Links, policy: str = "") -> str:
        """Render a page; `policy` is a content security policy for a page without a server."""
        template = self._jinja.get_template(page.template)
        return template.render(title=page.title, link=links, policy=policy, **page.values)


def _visible(text: object) -> Markup:
    """Escape a text, and show control characters as their codes."""
    return Markup("").join(
        Markup('<span class="acting">{}</span>').format(piece) if acting else escape(piece)
        for piece, acting in split_visible(str(text))
    )


def _number(value: float | None, digits: int = 3) -> str:
    if value is None or math.isnan(value):
        return _NONE
    if 0.1 <= abs(value) < 1e5 or value == 0:
        return f"{value:.{digits}f}"
    return f"{value:.{digits}g}"


def _exact(value: float) -> str:
    """Format a float32 so that it can be read back exactly."""
    return _NONE if math.isnan(value) else f"{value:.9g}"


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{100 * value:.1f} %"


def _size(count: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def _when(seconds: float) -> Markup:
    """Format a time as UTC."""
    if not seconds:
        return Markup(_NONE)
    moment = datetime.fromtimestamp(seconds, UTC)
    text = moment.strftime("%Y-%m-%d %H:%M:%S")
    return Markup('<time datetime="{}">{} UTC</time>').format(moment.isoformat(), text)


def _ago(seconds: float) -> str:
    gone = max(0.0, time.time() - seconds)
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if gone >= size:
            return f"{gone / size:.0f} {unit} ago"
    return f"{gone:.0f} s ago"


def _pretty(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, indent=2, ensure_ascii=False)


_FILTERS: dict[str, Callable[..., Any]] = {
    "visible": _visible,
    "number": _number,
    "exact": _exact,
    "percent": _percent,
    "size": _size,
    "when": _when,
    "ago": _ago,
    "pretty": _pretty,
}
