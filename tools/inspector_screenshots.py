"""Take the README's screenshots of the inspector from a run on this machine:

    python -m tools.inspector_screenshots --runs runs --run RUN_ID --out docs/images

It starts the inspector, opens its pages in a headless Chromium (`apt-get install chromium`), and
writes `inspector-run.png`, `inspector-step.png`, `inspector-tokens.png` and `inspector-curves.png`.
They show the last step and its worst attempt; `inspector-screen.png` is added if that clicked on a
screen."""

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

from PIL import Image
from playwright.sync_api import Page, ViewportSize, sync_playwright

from flotilla_common.process.python_command import python_command

MOST_BYTES = 300_000
_SIZE = ViewportSize(width=1280, height=860)
_METRIC = "reward/avg_pass_at_1"


def main(argv: Sequence[str] | None = None) -> int:
    chosen = _parse_arguments(argv)
    binary = shutil.which("chromium")
    if binary is None:
        print("error: chromium not found: apt-get install chromium", file=sys.stderr)
        return 1
    arguments = ("--end-with-stdin", "--runs", str(chosen.runs), "--run", chosen.run)
    command = python_command("-m", "flotilla_reading.inspector", *arguments)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as inspector:
        assert inspector.stdin is not None and inspector.stdout is not None
        line = inspector.stdout.readline()
        if not line:
            return 1
        chosen.out.mkdir(parents=True, exist_ok=True)
        for name, data in _take_all(binary, json.loads(line)["url"], chosen.run):
            path = chosen.out / f"inspector-{name}.png"
            path.write_bytes(data)
            print(f"{path}: {len(data):,} bytes")
        inspector.stdin.close()
    return 0


def _take_all(binary: str, url: str, run: str) -> Iterator[tuple[str, bytes]]:
    base = "{0.scheme}://{0.netloc}".format(urlsplit(url))
    with sync_playwright() as playwright:
        # Chromium's own sandbox needs privileges that root lacks in a container.
        sandbox = os.getuid() != 0
        browser = playwright.chromium.launch(executable_path=binary, chromium_sandbox=sandbox)
        page = browser.new_page(viewport=_SIZE, color_scheme="light")
        page.goto(url)
        yield "run", _take(page)
        page.get_by_role("link", name="Last step").click()
        yield "step", _take(page)
        page.get_by_role("link", name="Worst attempt").click()
        if (clicked := page.locator("figure.screen:has(svg)")).count():
            clicked.first.evaluate("screen => screen.scrollIntoView({block: 'center'})")
            clicked.first.locator("img").evaluate("image => image.decode()")
            yield "screen", _take(page)
        page.get_by_role("link", name="Tokens").click()
        _point_at_a_token(page)
        yield "tokens", _take(page)
        page.goto(f"{base}/curves?{urlencode({'run': run, 'metric': _METRIC}, quote_via=quote)}")
        page.locator("#plot canvas").wait_for()
        yield "curves", _take(page)
        browser.close()


def _point_at_a_token(page: Page) -> None:
    """Colour by logprob and show the numbers of the token with the lowest one."""
    page.wait_for_selector("#token-view[data-ready]")
    page.locator(".passage").first.scroll_into_view_if_needed()
    page.evaluate("document.querySelector('.tools').scrollIntoView()")
    for level in range(6, 0, -1):
        token = page.locator(f".t[data-b='s{level}']")
        if token.count():
            token.first.hover()
            return


def _take(page: Page) -> bytes:
    """Return the visible page as a small PNG. Raises ValueError if it is too large."""
    shot = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    packed = io.BytesIO()
    shot.save(packed, "PNG", optimize=True)
    if packed.tell() > MOST_BYTES:
        raise ValueError(f"a screenshot has {packed.tell():,} bytes; the limit is {MOST_BYTES:,}")
    return packed.getvalue()


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.inspector_screenshots",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--run", required=True)
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
