"""Screenshots that tools returned: in pages, in transcripts and in bundles."""

import base64
import hashlib
import io
import json
import zipfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from PIL import Image
from playwright.sync_api import Browser, Locator

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.token_authors import Author
from flotilla_common.domain.trajectory import Media
from flotilla_reading.inspector.adapters.rendering import STATIC, PageRenderer
from flotilla_reading.inspector.adapters.token_texts import load_run_tokenizer
from flotilla_reading.inspector.bundle import BundleMaker
from flotilla_reading.inspector.queries.run_library import RunLibrary
from tests.reading.inspector.made_runs import (
    RUN,
    MadeAttempt,
    MadeRun,
    conversation,
    open_run,
    run_apart,
)
from tests.reading.inspector.served_pages import (
    AXE,
    follow,
    serious_violations,
    serving,
    watched_page,
)
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
        seen = MadeAttempt(parts, 0.0, media=media, files=(png, *FALSE_ONES))
        attempts = [seen, MadeAttempt(conversation(2), 1.0)]
        await run.journal.begin_epoch(1)
        await run.plan_step(1, [await run.add_group(attempts, version=0)])
        await run.journal.close()
        return run

    run_apart(make())
    yield RunWithScreenshots(runs, png)


def _image(content: bytes, offset: int) -> Media:
    digest = hashlib.sha256(content).hexdigest()
    return Media(digest, "image/png", (1, 2, 2), offset, "", len(content))


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
        follow(page.get_by_role("link", name="Last step: 1"))
        follow(page.get_by_role("link", name="Worst attempt"))
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


PAD_RUN = 700
START, PADS, END = "<|vision_start|>", "<|image_pad|>" * PAD_RUN, "<|vision_end|>"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "computer",
            "description": "Coordinates are [x, y] with x from 0 to 999 and y from 0 to 999.",
            "parameters": {"type": "object"},
        },
    }
]


def screen_file(colour: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (400, 200), colour).save(file, "PNG")
    return file.getvalue()


SCREENS = (screen_file("navy"), screen_file("teal"))


def screen_parts() -> list[tuple[Author, str]]:
    """An episode that is shown a screen, clicks twice, is shown the next screen, and is done."""
    shown = f"{START}{PADS}{END}"
    clicks = [
        json.dumps({"name": "computer", "arguments": {"action": action, **points}})
        for action, points in (
            ("left_click", {"coordinate": [250, 500]}),
            ("left_click_drag", {"start_coordinate": [0, 0], "coordinate": [500, 999]}),
        )
    ]
    answers = ("clicked", shown)
    parts = [
        (
            Author.PROMPT,
            f"<|im_start|>user\nOpen the mail.{shown}<|im_end|>\n<|im_start|>assistant\n",
        )
    ]
    for click, answer in zip(clicks, answers, strict=True):
        parts.append((Author.POLICY, f"<tool_call>\n{click}\n</tool_call><|im_end|>"))
        parts.append(
            (
                Author.ENVIRONMENT,
                f"\n<|im_start|>user\n<tool_response>\n{answer}\n</tool_response><|im_end|>\n"
                "<|im_start|>assistant\n",
            )
        )
    parts.append((Author.POLICY, "The mail is open.<|im_end|>"))
    return parts


@pytest.fixture(scope="module")
def clicked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose attempt sees screens and clicks on them."""
    runs = tmp_path_factory.mktemp("clicked") / "runs"

    async def make() -> MadeRun:
        run = open_run(runs)
        parts = screen_parts()
        ids = [run.tokenizer.encode(text).ids for _, text in parts]
        pad = run.tokenizer.token_to_id("<|image_pad|>")
        flat = [token for each in ids for token in each]
        starts = [n for n in range(1, len(flat)) if flat[n] == pad != flat[n - 1]]
        media = tuple(map(_image, SCREENS, starts))
        tools = json.dumps(TOOLS).encode()
        seen = MadeAttempt(parts, 0.0, media=media, files=SCREENS, tools=tools)
        await run.journal.begin_epoch(1)
        group = await run.add_group([seen, MadeAttempt(conversation(2), 1.0)], version=0)
        await run.plan_step(1, [group])
        await run.journal.close()
        return run

    run_apart(make())
    return runs


def test_each_turns_clicks_are_drawn_on_the_screen_that_it_saw(
    browser: Browser, clicked: Path
) -> None:
    with serving(clicked) as served, watched_page(browser) as watched:
        page = watched.page
        page.goto(served.url)
        page.goto(served.base + PAGE)
        figures = page.locator("main figure.screen")
        assert figures.count() == 2
        first, second = figures.nth(0), figures.nth(1)
        assert second.locator("svg, figcaption").count() == 0
        # In pixels of the screen, which has 400 x 200: the calls were in thousandths.
        circles = [
            (float(c.get_attribute("cx") or ""), float(c.get_attribute("cy") or ""))
            for c in first.locator("circle").all()
        ]
        assert circles == [(100, 100), (0, 0), (200, pytest.approx(199.8))]
        assert first.locator("polyline").get_attribute("points") == "0,0 200,199.8"
        assert first.locator("figcaption").inner_text() == (
            "Marked: turn 1, left_click at 100, 100; turn 2, left_click_drag at 0, 0 → 200, 200"
        )
        image, drawn = (first.locator(each).bounding_box() for each in ("img", "svg"))
        assert image and drawn
        assert drawn == pytest.approx(image, abs=2)
        answer = page.request.get(f"{served.base}{PAGE}/media/0/0")
        assert answer.body() == SCREENS[0]
        assert answer.headers["content-type"] == "image/png"
        assert answer.headers["x-content-type-options"] == "nosniff"
        # The text has a picture's token once.
        said = page.locator(".message.user .text").first.inner_text()
        assert said == "Open the mail.<|vision_start|><|image_pad|><|vision_end|>"
        assert watched.troubles == []
        if AXE.exists():
            assert serious_violations(page) == []


def test_the_tokens_of_a_picture_are_one_item_of_the_token_view(
    browser: Browser, clicked: Path
) -> None:
    with serving(clicked) as served, watched_page(browser) as watched:
        page = watched.page
        page.goto(served.url)
        page.goto(f"{served.base}{PAGE}?view=tokens")
        page.wait_for_selector("#token-view[data-ready]")
        pictures = page.locator(".t.picture")
        assert pictures.all_inner_texts() == [f"picture, {PAD_RUN} tokens"] * 2
        assert page.get_by_text("<|image_pad|>").count() == 0
        assert page.locator(".t").count() < 400
        start = int(pictures.first.get_attribute("data-i") or "")
        pictures.first.click()
        for key, place in (
            ("ArrowRight", start + PAD_RUN),
            ("ArrowLeft", start),
            ("ArrowLeft", start - 1),
            ("ArrowDown", start + 9),
        ):
            page.keyboard.press(key)
            shown = place if not start <= place < start + PAD_RUN else start
            assert page.evaluate("document.activeElement.dataset.i") == str(shown)
        page.keyboard.press("5")
        assert pictures.first.get_attribute("data-b") == "k7"
        assert watched.troubles == []
