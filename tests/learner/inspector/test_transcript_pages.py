"""Transcripts over HTTP, and in a real browser."""

import http.client
import json
from collections.abc import Generator
from pathlib import Path
from time import monotonic, sleep
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser

from services.common.domain.trajectory import Author
from services.learner.inspector.adapters.transcript_pages import find_viewer
from services.learner.inspector.pages.links import ServerLinks
from tests.learner.inspector.made_runs import (
    RUN,
    MadeAttempt,
    MadeRun,
    conversation,
    open_run,
    run_apart,
)
from tests.learner.inspector.served_pages import ServedPages, serving, watched_page
from tests.learner.inspector.transcript_logs import read_log

BELOW = f"/runs/{RUN}/transcripts"
# Chromium writes to the console what it refuses; a script of an episode would open a dialog.
HOSTILE = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e"
    " ![x](https://example.com/x.png) <img src='https://example.com/y.png'>"
)
# Until a busy machine has made a transcript.
WAIT_S = 180.0

Answer = tuple[int, dict[str, str], bytes]


def get(served: ServedPages, path: str, *, token: bool = True, **headers: str) -> Answer:
    parts = urlsplit(served.url)
    secret = parse_qs(parts.query)["token"][0]
    known = {"Authorization": f"Bearer {secret}"} if token else {}
    connection = http.client.HTTPConnection(parts.netloc, timeout=30)
    try:
        connection.request("GET", path, headers={**known, **headers})
        answer = connection.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, found, answer.read()
    finally:
        connection.close()


def wait_for(served: ServedPages, path: str) -> str:
    """Request a transcript until it is made; return the target of its page."""
    end = monotonic() + WAIT_S
    while monotonic() < end:
        status, headers, body = get(served, path)
        if status == 303:
            return headers["location"]
        assert (status, headers["refresh"]) == (202, "1"), body
        sleep(0.3)
    raise AssertionError(f"no transcript after {WAIT_S} s")


@pytest.fixture(scope="module")
def hostile_runs(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    runs = tmp_path_factory.mktemp("hostile") / "runs"

    async def make() -> MadeRun:
        run = open_run(runs)
        parts = conversation(2, answer=HOSTILE)
        parts[-1] = (Author.POLICY, f"{HOSTILE} is booked.<|im_end|>")
        bad = MadeAttempt(parts, 0.0, failed=(HOSTILE,))
        good = MadeAttempt(conversation(2), 1.0)
        await run.plan_step(1, [await run.add_group([bad, good], version=0)])
        await run.journal.close()
        return run

    run_apart(make())
    yield runs


def test_a_transcript_is_made_once_and_read_by_ranges(served: ServedPages, tmp_path: Path) -> None:
    where = wait_for(served, f"{BELOW}/steps/3?group=g000011r0&index=1&attempt_try=0")
    log = "step_000003.eval"
    assert where == f"{BELOW}/viewer/#/logs/{log}/samples/sample/g000011r0/2/"
    # It is there: nothing is made again.
    assert get(served, f"{BELOW}/steps/3")[0] == 303
    status, _, data = get(served, f"{BELOW}/viewer/logs/{log}")
    assert status == 200
    (tmp_path / log).write_bytes(data)
    assert len(read_log(tmp_path / log).samples or []) == 15
    status, headers, part = get(served, f"{BELOW}/viewer/logs/{log}", Range="bytes=4-11")
    assert (status, part) == (206, data[4:12])
    assert headers["content-range"] == f"bytes 4-11/{len(data)}"
    listing = json.loads(get(served, f"{BELOW}/viewer/logs/listing.json")[2])
    assert [each["task"] for each in listing.values()] == ["step 3"]


def test_transcripts_need_the_token_and_a_known_host(served: ServedPages) -> None:
    for path in ("/viewer/", "/viewer/assets/index.js", "/viewer/logs/listing.json", "/steps/3"):
        assert get(served, BELOW + path, token=False)[0] == 401
        assert get(served, BELOW + path, Host="evil.example")[0] == 421


def test_the_looser_policy_holds_for_the_viewer_alone_and_lets_nothing_in(
    served: ServedPages,
) -> None:
    for path in ("/viewer/", "/viewer/assets/decompression.worker.js"):
        policy = get(served, BELOW + path)[1]["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "http" not in policy and "*" not in policy
        assert "'unsafe-eval'" not in policy
        scripts = next(part for part in policy.split("; ") if part.startswith("script-src"))
        assert "'unsafe-inline'" not in scripts
    for path in (f"/runs/{RUN}/steps/3", f"{BELOW}/viewer/logs/listing.json"):
        assert "unsafe" not in get(served, path)[1]["content-security-policy"]


def test_steps_runs_and_logs_that_are_not_there_are_refused(served: ServedPages) -> None:
    for path in (
        f"{BELOW}/steps/99",
        f"{BELOW}/steps/x",
        f"{BELOW}/evals/none",
        f"{BELOW}/viewer/logs/step_000099.eval",
        f"{BELOW}/viewer/logs/..%2f..%2fspec.json",
        f"{BELOW}/viewer/assets/..%2findex.html",
        "/runs/none/transcripts/viewer/",
    ):
        assert get(served, path)[0] == 404, path


def test_pages_show_how_to_get_transcripts_where_there_is_no_viewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert find_viewer() is None
    links = ServerLinks()
    assert links.step_transcript(RUN, 3) == "" and "pip install" in links.advice
    assert ServerLinks(transcripts=True).advice == ""


# Inspect's viewer, pinned, takes seconds to show a page; what it may do at all is tested above.
@pytest.mark.slow
def test_the_viewer_shows_hostile_text_as_text_and_calls_no_other_host(
    browser: Browser, hostile_runs: Path
) -> None:
    with serving(hostile_runs) as served, watched_page(browser) as watched:
        page = watched.page
        page.goto(served.url)
        page.goto(f"{served.base}/runs/{RUN}/attempts/g000000r0/0/0")
        page.get_by_role("link", name="Transcript").click()
        page.wait_for_url("**/viewer/#/logs/**", timeout=WAIT_S * 1000)
        page.get_by_text("Model Call").first.wait_for(timeout=60_000)
        page.get_by_text("<script>alert(1)</script>").first.wait_for(timeout=60_000)
        assert page.locator("img[src*='example.com']").count() == 0
        hosts = {urlsplit(url).netloc for url in watched.requests if not url.startswith("data:")}
        assert hosts == {urlsplit(served.base).netloc}
        assert "a dialog opened" not in watched.troubles
        assert not [t for t in watched.troubles if "error" in t or "refused" in t.lower()]
