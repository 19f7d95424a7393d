"""Search of attempts, and a task across steps, by the journal of a run."""

import sqlite3
from collections.abc import Generator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from flotilla_common.domain.attempts import FailureKind, StopReason
from flotilla_reading.inspector.adapters.token_texts import load_run_tokenizer
from flotilla_reading.inspector.pages.links import ServerLinks
from flotilla_reading.inspector.pages.search import search_page
from flotilla_reading.inspector.pages.tasks import compare_page, task_page
from flotilla_reading.inspector.queries import attempt_search, task_groups
from flotilla_reading.inspector.queries.attempt_search import SearchResult
from flotilla_reading.inspector.queries.run_folders import read_journal
from flotilla_reading.inspector.queries.run_library import RunLibrary
from tests.reading.inspector.made_runs import (
    RUN,
    MadeAttempt,
    MadeRun,
    conversation,
    make_task,
    open_run,
    run_apart,
)

LINKS = ServerLinks()
GOOD = MadeAttempt(conversation(3), 1.0)
BAD = MadeAttempt(conversation(2, answer="Error: no such city: RÓMA"), 0.0, tool_errors=1)
HALF = MadeAttempt(conversation(2), 0.5, stop=StopReason.MAX_TURNS)
LOST = MadeAttempt(conversation(1), None, failure=FailureKind.ENV_LOST)


async def _write(run: MadeRun) -> None:
    """Journal two steps and an evaluation of one task, and a group of another environment."""
    await run.journal.begin_epoch(1)
    for step, attempts in ((1, [BAD, BAD, LOST]), (2, [GOOD, BAD])):
        group = await run.add_group(attempts, task=make_task(0), version=step - 1)
        await run.plan_step(step, [group])
    await run.add_group([HALF, GOOD], task=make_task(1, env="shop"))
    await run.add_group([GOOD, HALF], task=make_task(0), eval_id="after-1-2")
    await run.journal.add_evaluation("after-1-2", "after", 2, {})
    await run.journal.close()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> RunLibrary:
    runs = tmp_path_factory.mktemp("searched") / "runs"
    run_apart(_write(open_run(runs)))
    return RunLibrary(runs, load_run_tokenizer)


@pytest.fixture
def db(library: RunLibrary) -> Generator[sqlite3.Connection]:
    with read_journal(library.open(RUN).folder) as found:
        yield found


def search(
    library: RunLibrary, query: Mapping[str, str], before: int | None = None
) -> SearchResult:
    return search_page(library, LINKS, RUN, query, before).values["found"]


def numbers(found: SearchResult) -> list[str]:
    return [f"{hit.group.task_key[-1]}.{hit.row.index}" for hit in found.hits]


@pytest.mark.parametrize(
    ("query", "hits"),
    [
        ({}, ["0.1", "0.0", "1.1", "1.0", "0.1", "0.0", "0.2", "0.1", "0.0"]),
        ({"env": "shop"}, ["1.1", "1.0"]),
        ({"env": "none"}, []),
        ({"outcome": "passed"}, ["0.0", "1.1", "0.0"]),
        ({"outcome": "failed"}, ["0.1", "1.0", "0.1", "0.1", "0.0"]),
        ({"outcome": "ungraded"}, ["0.2"]),
        ({"min": "0.25", "max": "0.75"}, ["0.1", "1.0"]),
        ({"max": "0"}, ["0.1", "0.1", "0.0"]),
        ({"ended": "max_turns"}, ["0.1", "1.0"]),
        ({"ended": "env_lost"}, ["0.2"]),
        ({"errors": "1"}, ["0.1", "0.1", "0.0"]),
        ({"class": "never_done"}, ["0.1", "1.0"]),
        ({"class": "no_environment_answer"}, ["0.2"]),
        ({"class": "never_done", "outcome": "passed"}, []),
        ({"text": "such city: róma"}, ["0.1", "0.1", "0.0"]),
        ({"text": '"city": "Rome"', "outcome": "passed"}, ["0.0", "1.1", "0.0"]),
        ({"text": "%_.*"}, []),
        ({"text": "aurora", "env": "shop", "max": "0.5"}, ["1.0"]),
    ],
)
def test_a_search_finds_attempts_newest_first(
    library: RunLibrary, query: dict[str, str], hits: list[str]
) -> None:
    assert numbers(search(library, query)) == hits


@pytest.mark.parametrize("limit", ["MOST_LOOKED_AT", "MOST_READ", "MOST_HITS"])
def test_a_search_that_ends_early_goes_on_without_a_gap(
    library: RunLibrary, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    query = {"text": "no such city"}
    whole, parts = search(library, query).hits, list[attempt_search.Hit]()
    monkeypatch.setattr(attempt_search, limit, 2)
    before, looked = None, 0
    while True:
        found = search(library, query, before)
        parts += found.hits
        looked += found.looked_at.last - found.looked_at.first + 1
        before = found.looked_at.before
        if before is None:
            break
    assert parts == list(whole) and looked == 9


def test_messages_that_are_no_longer_kept_are_counted(tmp_path: Path) -> None:
    run = open_run(tmp_path / "runs")
    run_apart(_write(run))
    with closing(sqlite3.connect(run.folder / "journal.sqlite")) as db, db:
        db.execute("UPDATE trajectories SET payload = NULL WHERE attempt_index = 0")
    found = search(RunLibrary(tmp_path / "runs", load_run_tokenizer), {"text": "no such city"})
    assert (numbers(found), found.unread) == (["0.1", "0.1"], 4)


def test_a_task_has_its_groups_of_training_and_evaluations(library: RunLibrary) -> None:
    page = task_page(library, LINKS, RUN, "booking-000", None)
    groups = page.values["found"].groups
    assert [(group.eval_id, group.step, group.passes) for group in groups] == [
        *(("after-1-2", None, 1), ("", 2, 1), ("", 1, 0))
    ]
    # Without a grade an attempt is in no rate.
    assert "evaluations from 0.5 to 0.5" in page.values["chart"].summary
    assert "training from 0 to 0.5; steps 1 to 2" in page.values["chart"].summary


def test_a_task_is_looked_for_in_newer_groups_first(
    db: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_groups, "MOST_GROUPS", 2)
    found = task_groups.read_task(db, "booking-000")
    assert [group.step for group in found.groups] == [None, 2]
    [first] = task_groups.read_task(db, "booking-000", found.looked_at.before).groups
    assert first.step == 1
    assert task_groups.read_task(db, "booking-000", also=first.group_id).groups[-1] == first
    other = task_groups.read_task(db, "booking-001").groups[0]
    assert other not in task_groups.read_task(db, "booking-000", also=other.group_id).groups


def test_attempts_side_by_side_are_different_ones_of_the_same_task(
    library: RunLibrary, tmp_path: Path
) -> None:
    def compare(*places: tuple[str, str]) -> list[str]:
        read = library.open(RUN).shelf.read
        page = compare_page(library, LINKS, lambda _, key: read(key), "booking-000", places)
        rows = [side.episode.row for side in page.values["sides"]]
        return [f"{row.group_id} {row.index}" for row in rows]

    newest, older = "after-1-2-heldout-00003", "g000000r0"
    assert compare((RUN, ""), (RUN, "")) == [f"{newest} 1", f"{newest} 0"]
    assert compare((RUN, f"{older}/2/0"), (RUN, "")) == [f"{older} 2", f"{newest} 1"]
    # One of another task.
    assert compare((RUN, "g000002r0/0/0"), (RUN, "x")) == [f"{newest} 1", f"{newest} 0"]
