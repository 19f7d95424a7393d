"""Screenshots that tools returned: in pages, in transcripts and in bundles."""

import base64
import hashlib
import zipfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Locator

from services.common.domain.attempts import AttemptKey
from services.common.domain.token_authors import Author
from services.common.domain.trajectory import Media
from services.reading.inspector.adapters.rendering import STATIC, PageRenderer
from services.reading.inspector.adapters.token_texts import load_run_tokenizer
from services.reading.inspector.bundle import BundleMaker
from services.reading.inspector.queries.run_library import RunLibrary
from tests.reading.inspector.made_runs import (
    RUN,
    MadeAttempt,
    MadeRun,
    conversation,
    open_run,
    run_apart,
)
from tests.reading.inspector.served_pages import serving, watched_page
from tests.reading.inspector.transcript_logs import read_log, write_here

KEY = AttemptKey("g000000r0", 0, 0)
PAGE = f"/runs/{RUN}/attempts/{KEY.group_id}/0/0"
HOTELS = "<body style='background:#dfe'><h1>Aurora, Rome</h1><p>80 a night</p></body>"
SCRIPT = b"<script>alert(1)</script>"
# What claims to be an image, and what browsers run if they are served it as what it is.
FALSE_ONES = (SCRIPT, b"<svg xmlns='http://www.w3.org/2000/svg'>" + SCRIPT + b"</svg>")


@dataclass(frozen=True, slots=True)
class RunWithScreenshots:
    runs: Path
    screenshot: bytes


@pytest.fixture(scope="module")
def shown(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Generator[RunWithScreenshots]:
    """A run whose tool returned a screenshot of a page, and two files that claim to be images."""
    with watched_page(browser) as watched:
        watched.page.set_content(HOTELS)
        png = watched.page.screenshot(full_page=False)
    runs = tmp_path_factory.mktemp("screenshots") / "runs"

    async def make() -> MadeRun:
        run = open_run(runs)
        parts = conversation(2, answer="[image/png, 9 bytes]")
        before = [part for part in parts if part[0] is not Author.ENVIRONMENT][:2]
        offset = sum(len(run.tokenizer.encode(text).ids) for _, text in before)
        media = tuple(_image(content, offset) for content in (png, *FALSE_ONES))
        attempts = [MadeAttempt(parts, 0.0, media=media), MadeAttempt(conversation(2), 1.0)]
        await run.journal.begin_epoch(1)
        await run.plan_step(1, [await run.add_group(attempts, version=0)])
        await run.journal.close()
        return run

    run_apart(make())
    yield RunWithScreenshots(runs, png)


def _image(content: bytes, offset: int) -> Media:
    digest = hashlib.sha256(content).hexdigest()
    return Media(digest, "image/png", (), offset, "", len(content), content)


def natural_width(image: Locator) -> int:
    return int(
        image.evaluate("async (image) => { await image.decode(); return image.naturalWidth; }")
    )


def test_a_page_shows_the_screenshot_of_a_tool_and_nothing_that_only_claims_to_be_one(
    browser: Browser, shown: RunWithScreenshots
) -> None:
    with serving(shown.runs) as served, watched_page(browser) as watched:
        page = watched.page
        page.goto(served.url)
        page.goto(served.base + PAGE)
        images = page.locator("main img")
        assert images.count() == 1
        assert natural_width(images.first) == 1280
        assert (images.first.get_attribute("alt") or "").startswith("Screenshot 1")
        # No larger than what it stands in, however large it is.
        box, room = images.first.bounding_box(), page.locator("main").bounding_box()
        assert box and room and 0 < box["width"] <= room["width"] and box["height"] <= 640
        answer = page.request.get(f"{served.base}{PAGE}/media/0/0")
        assert answer.body() == shown.screenshot
        assert answer.headers["content-type"] == "image/png"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        for number in (1, 2):
            assert page.request.get(f"{served.base}{PAGE}/media/0/{number}").status == 404
            text = page.request.get(f"{served.base}{PAGE}/raw/0/answer-{number}")
            assert text.headers["content-type"] == "text/plain; charset=utf-8"
            assert text.headers["content-disposition"].startswith("attachment")
        assert {urlsplit(url).hostname for url in watched.requests} == {"127.0.0.1"}
        assert watched.troubles == []


def test_a_bundle_has_the_screenshot(
    browser: Browser, shown: RunWithScreenshots, tmp_path: Path
) -> None:
    library = RunLibrary(shown.runs, load_run_tokenizer)
    BundleMaker(library, PageRenderer().render, STATIC).write(tmp_path / "out.zip", RUN, None)
    with zipfile.ZipFile(tmp_path / "out.zip") as file:
        held = [name for name in file.namelist() if name.endswith(".image")]
        assert [file.read(name) for name in held] == [shown.screenshot]
        file.extractall(tmp_path / "out")
    with watched_page(browser) as watched:
        page = watched.page
        page.goto((tmp_path / "out/index.html").as_uri())
        page.get_by_role("link", name="Last step: 1").click()
        page.get_by_role("link", name="Worst attempt").click()
        assert natural_width(page.locator("main img").first) == 1280
    assert {urlsplit(url).scheme for url in watched.requests} == {"file"}
    assert watched.troubles == []


def test_a_transcript_has_the_screenshot_and_notes_of_the_others(
    shown: RunWithScreenshots, tmp_path: Path
) -> None:
    log = tmp_path / "step1.eval"
    assert write_here(shown.runs / RUN, log, "--step", "1") == 0
    samples = read_log(log, resolve_attachments=True).samples or []
    [sample] = [each for each in samples if each.metadata["attempt"] == 0]
    answers = [each for each in sample.messages if each.role == "tool"]
    parts = [part for part in answers[0].content if not isinstance(part, str)]
    [image] = [part for part in parts if part.type == "image"]
    kind, _, data = image.image.partition(",")
    assert kind == "data:image/png;base64"
    assert base64.b64decode(data) == shown.screenshot
    assert "Screenshot or answer 2 is only on the attempt's page." in str(sample.metadata)
    assert "alert(1)" not in log.read_bytes().decode(errors="replace")
