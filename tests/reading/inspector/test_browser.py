"""The inspector in a real browser: from the list of runs down to a token's numbers."""

import json
import zipfile
from collections.abc import Generator
from pathlib import Path
from time import perf_counter
from typing import Any, Literal
from urllib.parse import quote, unquote, urlsplit

import numpy as np
import pytest
from playwright.sync_api import Browser, Page

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.token_authors import Author, policy_mask
from flotilla_common.run_folder.token_stats import read_token_stats, stats_path
from flotilla_reading.inspector.adapters.rendering import STATIC, PageRenderer
from flotilla_reading.inspector.adapters.token_texts import load_run_tokenizer
from flotilla_reading.inspector.bundle import BundleMaker
from flotilla_reading.inspector.queries.run_library import RunLibrary
from tests.reading.inspector.made_runs import (
    LONG_WORD,
    RUN,
    MadeAttempt,
    MadeRun,
    conversation,
    make_task,
    open_run,
    run_apart,
)
from tests.reading.inspector.served_pages import (
    AXE,
    ServedPages,
    WatchedPage,
    follow,
    numbers_shown,
    serious_violations,
    serving,
    watched_page,
)

WORST = AttemptKey("g000011r0", 1, 0)
# Seconds within which even a busy machine opens a page; the target is 2.
BOUND_S = 30.0


def attempt_url(base: str, key: AttemptKey, view: str = "", run: str = RUN) -> str:
    where = f"{base}/runs/{run}/attempts/{key.group_id}/{key.attempt_index}/{key.attempt_try}"
    return f"{where}?view={view}" if view else where


def open_tokens(page: Page, url: str) -> None:
    page.goto(url)
    page.wait_for_selector("#token-view[data-ready]")


def test_three_clicks_lead_to_the_worst_attempt_of_the_last_step(
    watched: WatchedPage, served: ServedPages
) -> None:
    page = watched.page
    page.goto(served.base)
    follow(page.get_by_role("link", name=RUN))
    follow(page.get_by_role("link", name="Last step: 3"))
    follow(page.get_by_role("link", name="Worst attempt"))
    assert urlsplit(page.url).path == urlsplit(attempt_url("", WORST)).path
    assert page.get_by_text("no hotel is booked").is_visible()
    assert page.locator(".call").first.inner_text().split() == [
        *("Calls", "find_hotels", "city", "Rome", "nights", "2")
    ]
    assert watched.troubles == []


def test_the_numbers_of_a_token_are_those_of_the_journal_and_the_trainer(
    watched: WatchedPage, served: ServedPages, made_run: MadeRun
) -> None:
    open_tokens(watched.page, attempt_url(served.base, WORST, "tokens"))
    sequence = made_run.trajectories[WORST].sequences[0]
    stats = read_token_stats(stats_path(made_run.folder, 3)).sequences[WORST, 0]
    ours = np.flatnonzero(policy_mask(sequence.spans))
    for place in (0, len(ours) // 2, len(ours) - 1):
        shown = numbers_shown(watched.page, int(ours[place]))
        assert int(shown["id"]) == sequence.token_ids[ours[place]]
        assert np.float32(shown["logprob"]) == sequence.logprobs[place]
        assert np.float32(shown["trainer's logprob"]) == stats.logprobs[place]
        assert np.float32(shown["advantage"]) == stats.advantages[place]
        assert np.float16(shown["entropy"]) == stats.entropy[place]
        assert np.float32(shown["correction weight"]) == stats.weights[place]
        # A correction masked the first one.
        masked = "trained" if place else "not trained"
        assert (shown["author"], shown["mask"]) == ("policy", masked)
        assert shown["policy version"] == "1:2"
    shown = numbers_shown(watched.page, 0)
    assert shown["author"] == "prompt"
    assert "logprob" not in shown and "advantage" not in shown


def test_the_text_of_all_tokens_is_that_of_the_episode(
    watched: WatchedPage, served: ServedPages, made_run: MadeRun
) -> None:
    open_tokens(watched.page, attempt_url(served.base, WORST, "tokens"))
    ids = made_run.trajectories[WORST].sequences[0].token_ids.tolist()
    text = made_run.tokenizer.decode(ids, skip_special_tokens=False)
    spans = watched.page.locator(".t").all_text_contents()
    assert len(spans) == len(ids)
    assert "".join(spans).replace("↵", "") == text


def test_keys_change_colours_and_lead_through_turns_and_tokens(
    watched: WatchedPage, served: ServedPages, made_run: MadeRun
) -> None:
    page = watched.page
    open_tokens(page, attempt_url(served.base, WORST, "tokens"))
    for number, name in enumerate(
        ("logprob", "difference", "advantage", "mask", "author", "version"), 1
    ):
        page.keyboard.press(str(number))
        assert page.locator("#track").get_attribute("data-colour") == name
        assert page.locator("button[aria-pressed='true']").get_attribute("data-colour") == name
        assert f"colour={name}" in page.url
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("ArrowRight")
    first = int(np.flatnonzero(policy_mask(made_run.trajectories[WORST].sequences[0].spans))[0])
    assert page.evaluate("document.activeElement.dataset.i") == str(first)
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.i") == str(first + 1)
    assert page.locator("#token-card").is_visible()
    assert "logprob" in page.locator("#token-voice").inner_text()
    page.keyboard.press("Escape")
    assert page.locator("#token-card").is_hidden()


def test_without_scripts_the_numbers_are_a_table(
    browser: Browser, served: ServedPages, made_run: MadeRun
) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(served.url)
    page.goto(attempt_url(served.base, WORST, "tokens"))
    follow(page.get_by_role("link", name="The same numbers as a table"))
    sequence = made_run.trajectories[WORST].sequences[0]
    rows = page.locator(".numbers tbody tr")
    assert rows.count() == len(sequence.token_ids)
    first = int(np.flatnonzero(policy_mask(sequence.spans))[0])
    cells = rows.nth(first).locator("td").all_inner_texts()
    assert np.float32(cells[3]) == sequence.logprobs[0]
    context.close()


def test_the_skip_link_is_the_first_stop(watched: WatchedPage, served: ServedPages) -> None:
    watched.page.goto(served.base)
    watched.page.keyboard.press("Tab")
    link = watched.page.locator(":focus")
    assert link.inner_text() == "Skip to content"
    link.press("Enter")
    assert watched.page.url.endswith("#main")


PAGES = {
    "runs": "/",
    "run": f"/runs/{RUN}",
    "steps": f"/runs/{RUN}/steps",
    "step": f"/runs/{RUN}/steps/3",
    "evaluation": f"/runs/{RUN}/evals/after-1-3",
    "analysis": f"/runs/{RUN}/analysis",
    "conversation": attempt_url("", WORST),
    "tokens": attempt_url("", WORST, "tokens"),
    "table": attempt_url("", WORST, "table"),
    "curves": "/curves?metric=policy/entropy&metric=reward/avg_raw_reward&axes=own",
    "search": f"/runs/{RUN}/attempts?text=aurora&outcome=passed",
    "task": f"/runs/{RUN}/task?key=booking-001",
    "compare": f"/compare?task=booking-001&run={RUN}&attempt=g000001r0/1/0",
    "missing": "/nothing",
}


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.slow)])
def test_axe_finds_nothing_serious(browser: Browser, served: ServedPages, scheme: str) -> None:
    if not AXE.exists():
        pytest.skip("no axe-core: npm ci --ignore-scripts --prefix .ci/axe")
    found: dict[str, list[str]] = {}
    # The scheme of colours changes nothing but these.
    rules = {"runOnly": ["color-contrast"]} if scheme == "dark" else {}
    with watched_page(browser, scheme=scheme) as watched:
        page = watched.page
        page.goto(served.url)
        for name, path in PAGES.items():
            page.goto(served.base + path)
            if name == "tokens":
                page.wait_for_selector("#token-view[data-ready]")
                page.keyboard.press("2")
            found[name] = serious_violations(page, **rules)
    assert found == {name: [] for name in PAGES}


def test_text_of_tokens_keeps_its_contrast_in_every_colour(
    watched: WatchedPage, served: ServedPages
) -> None:
    if not AXE.exists():
        pytest.skip("no axe-core: npm ci --ignore-scripts --prefix .ci/axe")
    schemes: list[Literal["light", "dark"]] = ["light", "dark"]
    found: dict[tuple[str, str], list[str]] = {}
    for scheme in schemes:
        watched.page.emulate_media(color_scheme=scheme)
        # A page that is open would fade from one scheme to the other.
        open_tokens(watched.page, attempt_url(served.base, WORST, "tokens"))
        for colour in "123456":
            watched.page.keyboard.press(colour)
            found[scheme, colour] = serious_violations(watched.page, runOnly=["color-contrast"])
    watched.page.emulate_media(color_scheme="light")
    assert found == {(scheme, colour): [] for scheme in schemes for colour in "123456"}


HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>"
    '</div></script><a href="javascript:alert(3)">{{ 7 * 7 }}'
    "<link rel=stylesheet href=http://192.0.2.1/x.css><img src=http://192.0.2.1/x.png>"
    "\x1b[2J\x1b]0;owned\x07\u202egnp.exe\u2066\u200b\x00 \U000e0041"
)
LONG_BYTES = 2 << 20


@pytest.fixture(scope="module")
def other_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for runs of one test each."""
    return tmp_path_factory.mktemp("others") / "runs"


@pytest.fixture(scope="module")
def other_pages(other_runs: Path) -> Generator[ServedPages]:
    other_runs.mkdir()
    with serving(other_runs) as pages:
        yield pages


@pytest.fixture(scope="module")
def hostile_run(other_runs: Path) -> MadeRun:
    async def make() -> MadeRun:
        run = open_run(other_runs, "hostile-20260101-120000")
        await run.journal.begin_epoch(1)
        parts = [
            (Author.PROMPT, f"<|im_start|>user\n{HOSTILE}<|im_end|>\n<|im_start|>assistant\n"),
            (
                Author.POLICY,
                f'{HOSTILE}<tool_call>\n{{"name": "<b>x</b>", "arguments": '
                f"{json.dumps({HOSTILE: HOSTILE})}}}\n</tool_call><|im_end|>",
            ),
            (
                Author.ENVIRONMENT,
                f"\n<|im_start|>user\n<tool_response>\n{HOSTILE}"
                "\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
            ),
            (Author.POLICY, "done<|im_end|>"),
        ]
        hostile = MadeAttempt(parts, 0.0, failed=(HOSTILE,), passed=(HOSTILE,))
        long = MadeAttempt(conversation(2, answer=LONG_WORD * (LONG_BYTES // len(LONG_WORD))), 1.0)
        task = make_task(0, HOSTILE)
        group = await run.add_group([hostile, long], task=task)
        await run.plan_step(1, [group])
        (run.folder / "metrics.jsonl").write_text(json.dumps({"step": 1, HOSTILE: 1.0}) + "\n")
        alarm = {
            "time": 1.8e9,
            "step": 1,
            "state": "raised",
            "alarm": HOSTILE,
            "scope": "all",
            "severity": HOSTILE,
            "cause": HOSTILE,
            "fix": HOSTILE,
        }
        (run.folder / "alarms.jsonl").write_text(json.dumps(alarm) + "\n")
        await run.journal.close()
        return run

    return run_apart(make())


def test_hostile_episodes_are_harmless(
    browser: Browser, other_pages: ServedPages, hostile_run: MadeRun
) -> None:
    key, served, run = AttemptKey("g000000r0", 0, 0), other_pages, hostile_run.folder.name
    with watched_page(browser) as watched:
        page = watched.page
        page.goto(served.url)
        for path in (
            f"/runs/{run}",
            f"/runs/{run}/steps/1",
            "/curves",
            f"/curves?metric={HOSTILE}",
            f"/runs/{run}/attempts?text=<script>",
            f"/runs/{run}/attempts?text={quote(HOSTILE)}&env={quote(HOSTILE)}",
            f"/runs/{run}/task?key=booking-000",
            f"/runs/{run}/task?key={quote(HOSTILE)}",
            f"/compare?task=booking-000&run={run}",
            attempt_url("", key, run=run),
            attempt_url("", key, "table", run),
        ):
            page.goto(served.base + path)
            assert page.locator("main script:not([type]), main img, main link").count() == 0
        open_tokens(page, attempt_url(served.base, key, "tokens", run))
        assert page.locator("main img, main b:not(.token-card b)").count() == 0
        page.goto(attempt_url(served.base, key, run=run))
        text = page.locator("main").inner_text()
        assert "<script>alert(1)</script>" in text
        assert "\u202e" not in text and "\x1b" not in text
        acting = set(page.locator(".acting").all_inner_texts())
        assert {"U+202E", "U+001B", "U+2066", "U+200B", "U+E0041"} <= acting
        page.locator(".acting").first.hover()
    hosts = {urlsplit(url).hostname for url in watched.requests}
    assert hosts <= {"127.0.0.1"}
    assert watched.troubles == []


def test_a_long_answer_is_cut_and_can_be_fetched_as_text(
    browser: Browser, other_pages: ServedPages, hostile_run: MadeRun, tmp_path: Path
) -> None:
    key, served = AttemptKey("g000000r0", 1, 0), other_pages
    with watched_page(browser) as watched:
        page = watched.page
        page.goto(served.url)
        page.goto(attempt_url(served.base, key, run=hostile_run.folder.name))
        assert len(page.content()) < 300_000
        link = page.get_by_role("link", name="Get the whole text")
        with page.expect_download() as started:
            link.click()
        started.value.save_as(tmp_path / "text.txt")
        assert (tmp_path / "text.txt").read_text().startswith("<i>x</i> <i>x</i>")
        assert (tmp_path / "text.txt").stat().st_size > LONG_BYTES - 1000
        answer = page.request.get(page.url.split("?")[0] + "/raw/0/message-3")
        assert answer.headers["content-type"] == "text/plain; charset=utf-8"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-disposition"].startswith("attachment")


def test_an_episode_of_fifty_turns_and_sixty_thousand_tokens_opens_and_scrolls(
    browser: Browser, other_runs: Path, other_pages: ServedPages, record_property: Any
) -> None:
    async def make() -> MadeRun:
        run = open_run(other_runs, "long-20260101-120000")
        await run.journal.begin_epoch(1)
        long = MadeAttempt(conversation(50, words=290), 0.0)
        short = MadeAttempt(conversation(2), 1.0)
        await run.plan_step(1, [await run.add_group([long, short])])
        await run.journal.close()
        return run

    run, key = run_apart(make()), AttemptKey("g000000r0", 0, 0)
    count = len(run.trajectories[key].sequences[0].token_ids)
    assert count >= 60_000
    with watched_page(browser) as watched:
        page = watched.page
        page.goto(other_pages.url)
        begin = perf_counter()
        open_tokens(page, attempt_url(other_pages.base, key, "tokens", run.folder.name))
        seconds = perf_counter() - begin
        record_property("open_s", seconds)
        print(f"{count} tokens in {seconds:.2f} s")
        assert seconds < BOUND_S
        assert page.locator(".passage").count() == 1 + 50 + 49
        # Those in sight: that it opens at once is by the few that are made.
        assert page.locator(".t").count() < count / 20
        page.locator(".passage").last.scroll_into_view_if_needed()
        last = page.locator(f".t[data-i='{count - 1}']")
        last.wait_for()
        page.keyboard.press("End")
        assert last.inner_text() == "<|im_end|>"
        assert watched.troubles == []


async def _play(run: MadeRun, reward: float) -> str:
    return await run.add_group([MadeAttempt(conversation(2), reward)], size=4)


def test_the_live_board_follows_a_run_in_progress(
    browser: Browser, other_runs: Path, other_pages: ServedPages
) -> None:
    run = open_run(other_runs, "live-20260101-120000")
    run_apart(run.journal.begin_epoch(1))
    run_apart(_play(run, 1.0))
    with watched_page(browser) as watched:
        page = watched.page
        page.goto(other_pages.url)
        page.goto(f"{other_pages.base}/runs/{run.folder.name}")
        assert page.locator("h1 .state").inner_text() == "running"
        assert page.locator("#live .board li").count() == 1
        run_apart(_play(run, 0.0))
        page.locator("#live .board li").nth(1).wait_for()
        assert page.locator("#live dd").first.inner_text() == "2"
        assert page.get_by_label("1 of 4 attempts received").count() == 2
    run_apart(run.journal.close())


def test_a_curve_is_drawn_and_is_a_table_as_well(watched: WatchedPage, served: ServedPages) -> None:
    page = watched.page
    page.goto(f"{served.base}/curves")
    page.get_by_label("Metric 1").select_option("policy/entropy")
    follow(page.get_by_role("button", name="Show"))
    page.locator("#plot canvas").wait_for()
    assert "metric=policy%2Fentropy" in page.url
    page.get_by_text("Values as a table").click()
    rows = page.locator("#curve-table tbody tr").all_inner_texts()
    assert [row.split() for row in rows] == [["3", "0.3333"], ["2", "0.5000"], ["1", "1.0000"]]
    assert watched.troubles == []


def test_an_address_holds_several_metrics_with_an_axis_each(
    watched: WatchedPage, served: ServedPages
) -> None:
    page = watched.page
    page.goto(f"{served.base}/curves?metric=policy/entropy")
    page.get_by_label("Metric 2").select_option("reward/avg_pass_at_1")
    page.get_by_label("An axis for each metric").check()
    follow(page.get_by_role("button", name="Show"))
    page.goto(page.url)
    page.locator("#plot canvas").wait_for()
    legend = page.locator(".u-legend .u-label").all_inner_texts()
    assert legend == ["step", "policy/entropy", "reward/avg_pass_at_1"]
    # The axis of steps, and two of values.
    assert page.locator(".u-axis").count() == 3
    page.get_by_text("Values as a table").click()
    first = page.locator("#curve-table tbody tr").first.inner_text().split()
    assert first == ["3", "0.3333", "0.3000"]
    assert watched.troubles == []


def test_a_run_begins_with_the_curves_of_its_rewards(
    watched: WatchedPage, served: ServedPages
) -> None:
    watched.page.goto(f"{served.base}/runs/{RUN}")
    chart = watched.page.get_by_role("img", name="held-out pass@1 from 0.5 to 0.5")
    assert "training reward from 0.2 to 0.6; steps 1 to 3" in (
        chart.get_attribute("aria-label") or ""
    )
    assert chart.locator(".line-1 path").count() == 1
    assert chart.locator(".line-2 circle").count() == 3
    heights = [
        float(p.split(",")[1])
        for p in str(chart.locator(".line-2 polyline").get_attribute("points")).split()
    ]
    assert heights == sorted(heights, reverse=True)


def test_a_search_leads_to_a_task_across_steps_and_to_two_attempts_side_by_side(
    watched: WatchedPage, served: ServedPages
) -> None:
    page = watched.page
    page.goto(f"{served.base}/runs/{RUN}")
    follow(page.get_by_role("link", name="Search attempts"))
    page.get_by_label("Text in messages").fill("aurora IS booked")
    page.get_by_label("Outcome").select_option("failed")
    page.get_by_label("Reward from").fill("0.25")
    follow(page.get_by_role("button", name="Search"))
    rows = page.locator("tbody tr:not(.excerpt)")
    assert rows.count() == 3
    assert "The Aurora is booked." in page.locator(".excerpt").first.inner_text()
    assert page.get_by_label("Outcome").input_value() == "failed"
    assert page.get_by_text("Looked at attempts 1 to 44 of 44").is_visible()
    follow(rows.last.get_by_role("link", name="booking-000"))
    assert page.locator("tbody tr").count() == 1
    assert "3 of 4" in page.locator("tbody tr").inner_text()
    follow(page.locator(".tries a").first)
    follow(page.get_by_role("link", name="Side by side with another attempt"))
    sides = page.locator(".compare section")
    assert "wrong nights" in sides.first.inner_text()
    assert "wrong nights" not in sides.last.inner_text()
    page.locator("#attempt-2").select_option("g000000r0/3/0")
    follow(page.get_by_role("button", name="Show"))
    sides.last.get_by_role("link", name="attempt 3").wait_for()
    assert sides.first.get_by_role("link", name="attempt 1").is_visible()
    assert watched.troubles == []


def test_a_bundle_opens_from_its_files_alone(
    browser: Browser, made_run: MadeRun, tmp_path: Path
) -> None:
    library = RunLibrary(made_run.folder.parent, load_run_tokenizer)
    BundleMaker(library, PageRenderer().render, STATIC).write(tmp_path / "out.zip", RUN, None)
    with zipfile.ZipFile(tmp_path / "out.zip") as file:
        file.extractall(tmp_path / "out")
    with watched_page(browser) as watched:
        page = watched.page
        page.goto((tmp_path / "out/index.html").as_uri())
        follow(page.get_by_role("link", name="Last step: 3"))
        follow(page.get_by_role("link", name="Worst attempt"))
        assert page.get_by_text("no hotel is booked").is_visible()
        follow(page.get_by_role("link", name="Tokens"))
        page.wait_for_selector("#token-view[data-ready]")
        sequence = made_run.trajectories[WORST].sequences[0]
        place = int(np.flatnonzero(policy_mask(sequence.spans))[3])
        assert np.float32(numbers_shown(page, place)["logprob"]) == sequence.logprobs[3]
        follow(page.get_by_role("link", name="Curves"))
        page.locator("#plot canvas").wait_for()
        for link in page.locator("a[href]").all():
            target = urlsplit(page.evaluate("a => a.href", link.element_handle()))
            assert target.scheme == "file" and Path(unquote(target.path)).exists()
    assert {urlsplit(url).scheme for url in watched.requests} == {"file"}
    assert watched.troubles == []
