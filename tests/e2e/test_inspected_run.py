"""A real run, looked at while it goes on and when it has ended, by somebody elsewhere."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from playwright.sync_api import Browser, Page

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.token_authors import policy_mask
from flotilla_common.run_folder.journal_file import open_read_only
from flotilla_common.run_folder.token_stats import read_token_stats, stats_path
from flotilla_common.run_folder.trajectory_tables import trajectory_of
from tests.e2e.finished_run import FinishedRun, write_spec
from tests.reading.inspector.served_pages import WatchedPage, browsing, watched_page
from tests.reading.inspector.test_browser import numbers_shown
from tests.support.repository import ROOT
from tests.support.ssh_double import put_ssh_double
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("default"),
]

# It is still training when its page is open: a step takes a second.
STEPS = 30
FLOTILLA = (sys.executable, "-m", "flotilla_launcher.cli.app")
WAIT_S = 400.0


@contextmanager
def launched(runs: Path) -> Generator[str]:
    """A launcher of its own; the content of its launcher.json."""
    command = (sys.executable, "-m", "flotilla_launcher", "--runs", str(runs))
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            path = runs / "launcher.json"
            wait_until(path.exists, WAIT_S)
            yield path.read_text()
        finally:
            process.terminate()
            process.wait(60)


@contextmanager
def inspecting(environ: dict[str, str], here: Path) -> Generator[str]:
    """`flotilla inspect` of a run elsewhere; its link."""
    command = (*FLOTILLA, "inspect", "newest", "--runs", str(here))
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            told = iter(process.stdout.readline, "")
            yield next(line for line in told if line.startswith("Open ")).split()[1]
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(60)
        assert code == 0


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    with browsing() as found:
        yield found


def go_to_worst_attempt(page: Page, run_id: str) -> AttemptKey:
    """Three clicks from the list of runs."""
    page.get_by_role("link", name=run_id).click()
    page.get_by_role("link", name="Last step").click()
    page.get_by_role("link", name="Worst attempt").click()
    *_, group, index, attempt_try = urlsplit(page.url).path.split("/")
    return AttemptKey(group, int(index), int(attempt_try))


def check_tokens(watched: WatchedPage, run_dir: Path, key: AttemptKey, step: int) -> None:
    """Compare the numbers of some tokens with the journal's and the trainer's there."""
    page = watched.page
    page.get_by_role("link", name="Tokens").click()
    page.wait_for_selector("#token-view[data-ready]")
    with open_read_only(run_dir / "journal.sqlite") as db:
        sequence = trajectory_of(db, key).sequences[0]
    stats = read_token_stats(stats_path(run_dir, step)).sequences[key, 0]
    ours = np.flatnonzero(policy_mask(sequence.spans))
    for place in (0, len(ours) // 2, len(ours) - 1):
        shown = numbers_shown(page, int(ours[place]))
        assert int(shown["id"]) == sequence.token_ids[ours[place]]
        assert np.float32(shown["logprob"]) == sequence.logprobs[place]
        assert np.float32(shown["advantage"]) == stats.advantages[place]
        if stats.trained:
            assert np.float32(shown["trainer's logprob"]) == stats.logprobs[place]


def test_a_run_elsewhere_is_found_down_to_its_tokens_while_it_runs_and_when_it_has_ended(
    quick_policy: Path, tmp_path: Path, browser: Browser
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    spec = write_spec(tmp_path, quick_policy, steps=STEPS)
    with launched(there) as secret:
        put_ssh_double(tmp_path / "bin", tmp_path)
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        environ = {**os.environ, "FLOTILLA_LAUNCHER": secret, "PATH": path}
        submit = (*FLOTILLA, "submit", str(spec), "--request-id", "mine", "--detach")
        subprocess.run((*submit, "--runs", str(here)), cwd=ROOT, env=environ, check=True)
        run_dir = FinishedRun(there, 0, "").folder
        wait_until(lambda: stats_path(run_dir, 1).exists(), WAIT_S)
        with inspecting(environ, here) as link, watched_page(browser) as watched:
            page = watched.page
            page.goto(link)
            assert page.locator("h1 .state").inner_text() == "running"
            base = f"{urlsplit(link).scheme}://{urlsplit(link).netloc}"
            page.goto(base)
            go_to_worst_attempt(page, run_dir.name)
            # It is followed to its end.
            page.goto(f"{base}/runs/{run_dir.name}")

            def has_ended() -> bool:
                page.reload()
                return page.locator("h1 .state").inner_text() == "finished"

            wait_until(has_ended, WAIT_S)
            page.goto(base)
            key = go_to_worst_attempt(page, run_dir.name)
            check_tokens(watched, run_dir, key, STEPS)
            assert {urlsplit(url).hostname for url in watched.requests} == {"127.0.0.1"}
            assert watched.troubles == []
        summary = json.loads((run_dir / "summary.json").read_text())
        assert summary["steps"] == STEPS
    assert not (here / "runs").exists()
