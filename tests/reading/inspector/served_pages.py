"""The inspector's own process, and a headless Chromium that looks at its pages."""

import json
import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Locator, Page, sync_playwright

from tests.support.process_forge import shared_forge
from tests.support.repository import ROOT
from tests.support.started_process import started

AXE = ROOT / ".ci/axe/node_modules/axe-core/axe.min.js"
_NAMES = ("chromium", "chromium-browser", "google-chrome")
# Pages of Chromium's own address bar, which no test shows: they take most of a window's start.
_UNSEEN = "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup"


@dataclass(frozen=True, slots=True)
class ServedPages:
    """An inspector that serves; `url` holds the token."""

    url: str
    process: subprocess.Popen[str]

    @property
    def base(self) -> str:
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}"


def inspector_command(program: str, *arguments: str) -> tuple[str, ...]:
    """Return the command of a fork of a process that has imported the inspector's programs."""
    forge = shared_forge("tests.support.forged_inspector")
    return forge.python_command("-m", program, *arguments)


@contextmanager
def serving(runs: Path, *arguments: str) -> Generator[ServedPages]:
    """Start the program; it ends with its standard input."""
    command = inspector_command("flotilla_reading.inspector", "--runs", str(runs))
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'gen'}"}
    with started([*command, "--end-with-stdin", *arguments], env=environ) as (process, line):
        yield ServedPages(json.loads(line)["url"], process)
        # It ends with its standard input.
        process.communicate(timeout=20)


@contextmanager
def browsing() -> Generator[Browser]:
    """Start a headless Chromium of this machine; skip where there is none."""
    binary = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if binary is None:
        pytest.skip("no chromium: apt-get install chromium")
    # Its sandbox needs namespaces that root in a container has not.
    sandbox = os.getuid() != 0
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=binary, chromium_sandbox=sandbox, args=[_UNSEEN]
        )
        yield browser
        browser.close()


@dataclass(slots=True)
class WatchedPage:
    """A page whose requests, errors and dialogs are recorded."""

    page: Page
    requests: list[str]
    troubles: list[str]


@contextmanager
def watched_page(browser: Browser, *, scheme: str = "light") -> Generator[WatchedPage]:
    """Open a page in a context of its own."""
    dark = "dark" if scheme == "dark" else "light"
    context = browser.new_context(color_scheme=dark, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    watched = WatchedPage(page, [], [])
    page.on("request", lambda request: watched.requests.append(request.url))
    page.on("pageerror", lambda error: watched.troubles.append(f"error: {error}"))
    page.on("console", lambda line: watched.troubles.append(f"console: {line.text}"))

    def dismiss(dialog: object) -> None:
        watched.troubles.append("a dialog opened")
        dialog.dismiss()  # pyright: ignore[reportAttributeAccessIssue]

    page.on("dialog", dismiss)
    try:
        yield watched
    finally:
        context.close()


def serious_violations(page: Page, **options: Any) -> list[str]:
    """Return what axe finds, if it is serious."""
    # By the debugger, which no content security policy of the page keeps out.
    if page.evaluate("typeof axe") == "undefined":
        page.evaluate(AXE.read_text())
    given = json.dumps({"resultTypes": ["violations"], **options})
    result: dict[str, Any] = page.evaluate(f"axe.run({given})")
    return [
        f"{each['id']}: {each['nodes'][0]['html']} {each['nodes'][0]['failureSummary']}"
        for each in result["violations"]
        if each["impact"] in ("serious", "critical")
    ]


def follow(link: Locator) -> None:
    """Click what leads to another page, and wait until all of that page is there."""
    with link.page.expect_navigation():
        link.click()


def numbers_shown(page: Page, index: int) -> dict[str, str]:
    """Point at a token, and read its tooltip."""
    page.locator(f".t[data-i='{index}']").hover()
    page.wait_for_function(
        "i => document.getElementById('token-card').dataset.i === String(i)", arg=index
    )
    card = page.locator("#token-card")
    terms, details = card.locator("dt").all_inner_texts(), card.locator("dd").all_inner_texts()
    return dict(zip(terms, details, strict=True))
