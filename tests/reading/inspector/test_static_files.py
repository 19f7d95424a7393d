"""Files of others among the inspector's own, and that no page loads anything from elsewhere."""

import hashlib
import json
import re

import pytest

from flotilla_reading.inspector.adapters.rendering import PAGES, STATIC
from tests.support.repository import ROOT

UPLOT = STATIC / "vendor/uplot"


def test_uplot_is_the_published_package() -> None:
    """`npm pack uplot@VERSION` has these files; VERSION.json holds their hashes."""
    known = json.loads((UPLOT / "VERSION.json").read_text())
    held = {path.name for path in UPLOT.iterdir()} - {"VERSION.json"}
    assert held == set(known["sha256"])
    for name, digest in known["sha256"].items():
        assert hashlib.sha256((UPLOT / name).read_bytes()).hexdigest() == digest
    assert f"v{known['version']}" in (UPLOT / "uPlot.iife.min.js").read_text()[:400]
    assert "MIT License" in (UPLOT / "LICENSE").read_text()


@pytest.mark.parametrize(
    "path", sorted(PAGES.rglob("*.html")) + sorted(STATIC.glob("*.*")), ids=lambda path: path.name
)
def test_no_page_runs_or_loads_what_the_content_policy_forbids(path: object) -> None:
    text = (PAGES / str(path)).read_text()
    assert not re.search(r"\son\w+\s*=\s*[\"']", text), "no handlers in markup"
    assert not re.search(r"\sstyle\s*=\s*[\"']", text), "no styles in markup"
    assert not re.search(r"<script(?![^>]*(?:src=|application/json))", text), "no inline scripts"
    without_names = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(?:https?:)?//[a-z0-9]", without_names.replace("// ", "")), "no address"


def test_axe_is_pinned() -> None:
    lock = json.loads((ROOT / ".ci/axe/package-lock.json").read_text())
    assert lock["packages"]["node_modules/axe-core"]["integrity"].startswith("sha512-")
