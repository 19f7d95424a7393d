"""A finished run of three steps, made once for all tests of pages."""

import asyncio
from collections.abc import Generator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from flotilla_common.domain.attempts import FailureKind
from flotilla_reading.analysis.analysis_files import write_analysis
from flotilla_reading.analysis.run_analysis import analyze_run
from tests.reading.analysis.episode_rows import call, row, says, write_evaluation
from tests.reading.inspector.made_runs import (
    MadeAttempt,
    MadeRun,
    conversation,
    open_run,
    run_apart,
)
from tests.reading.inspector.served_pages import (
    ServedPages,
    WatchedPage,
    browsing,
    serving,
    watched_page,
)


async def write_run(run: MadeRun) -> None:
    """Journal three steps and an evaluation; the second group of each has most signal."""
    await run.journal.begin_epoch(1)
    for step in (1, 2, 3):
        good = MadeAttempt(conversation(3), 1.0, passed=("hotel booked",))
        bad = MadeAttempt(conversation(2), 0.0, failed=("no hotel is booked", "no price is named"))
        half = MadeAttempt(conversation(2), 0.5, passed=("hotel booked",), failed=("wrong nights",))
        lost = MadeAttempt(conversation(1), None, failure=FailureKind.ENV_LOST)
        mixed = await run.add_group([good, half, good, good], version=step - 1)
        split = await run.add_group([good, bad, bad, good, lost], version=step - 1)
        equal = await run.add_group([good, good], version=step - 1)
        stale = await run.add_group([bad, bad], version=step - 1)
        await run.drop(stale, "stale")
        await run.add_group([bad], version=step - 1, size=3)
        await run.plan_step(step, [mixed, split], [equal])
        run.log(step, reward__avg_raw_reward=0.2 * step, reward__avg_pass_at_1=0.1 * step)
        run.log(step, policy__entropy=1.0 / step)
    await run.add_group([good, bad], eval_id="after-1-3")
    heldout = {"tasks": 1, "pass_at_1": 0.5, "ci95": [0.1, 0.9], "missing": 0, "by_env": {}}
    await run.journal.add_evaluation("after-1-3", "after", 3, {"heldout": heldout})
    run.write("summary.json", {"eval": {"after": {"pass_at_1": 0.5}}, "steps": 3})
    await run.journal.close()


@pytest.fixture(autouse=True, scope="module")
def _unpatched_asyncio() -> Generator[None]:
    """Fail the module that has Inspect patch asyncio, not one after it."""
    yield
    assert not hasattr(asyncio, "_nest_asyncio2"), "read transcripts by `read_log`"


@pytest.fixture(scope="session")
def made_run(tmp_path_factory: pytest.TempPathFactory) -> Generator[MadeRun]:
    runs = tmp_path_factory.mktemp("inspector") / "runs"

    async def make() -> MadeRun:
        run = open_run(runs)
        await write_run(run)
        return run

    made = run_apart(make())
    unsure = [row(call("find", "the list is locked", "tool_error"), says("Sorry, I cannot."))]
    write_evaluation(made.folder, 3, [*unsure, row(says("Done."), reward=1.0, attempt_index=1)])
    write_analysis(made.folder, analyze_run(made.folder, None))
    yield made


@pytest.fixture(scope="session")
def runs(made_run: MadeRun) -> Path:
    return made_run.folder.parent


@pytest.fixture(scope="module")
def served(runs: Path) -> Generator[ServedPages]:
    with serving(runs) as pages:
        yield pages


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    with browsing() as found:
        yield found


@pytest.fixture(scope="module")
def shown_page(browser: Browser, served: ServedPages) -> Generator[WatchedPage]:
    """A page that has shown the token and may look at all others."""
    with watched_page(browser) as page:
        page.page.goto(served.url)
        yield page


@pytest.fixture
def watched(shown_page: WatchedPage) -> WatchedPage:
    """That page, empty. A context of its own for each test would cost half a second."""
    shown_page.page.goto("about:blank")
    shown_page.requests.clear()
    shown_page.troubles.clear()
    return shown_page
