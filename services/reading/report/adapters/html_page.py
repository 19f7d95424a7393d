"""A page as one HTML file, rendered by Jinja with everything escaped."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from services.common.text.printable_text import make_visible
from services.reading.report.page import PageSection


def render_html(title: str, sections: Sequence[PageSection], pictures: Mapping[str, bytes]) -> str:
    """Render a page that needs no other file. `pictures` are the SVG files by their names; they are
    embedded as images, which run no script."""
    jinja = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters["visible"] = make_visible
    sources = {
        name: f"data:image/svg+xml;base64,{base64.b64encode(data).decode()}"
        for name, data in pictures.items()
    }
    return jinja.get_template("page.html").render(title=title, sections=sections, sources=sources)
