"""Payloads that are held are not pruned, and no hold keeps more than its bound."""

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.run_folder.holds import FOLDER, MOST_GROUPS, Hold, release_hold, write_hold
from flotilla_learner.journal.holds import MOST_HOLDS, JournalHolds
from flotilla_learner.journal.schema import TABLES
from tests.learner.run.test_train_loop import query, run_to_the_end

REMOTE = {"steps": [1, 10**30], "groups": ["g"]}
GROUPS_PER_STEP = 60
STEPS = 10


@pytest.fixture
def db() -> Iterator[sqlite3.Connection]:
    """A journal's tables, with many groups of each step and of an evaluation."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.executescript(TABLES)
        for step in range(1, STEPS + 1):
            db.execute("INSERT INTO plans VALUES (?, 1, '[]', '{}', x'')", (step,))
            rows = [(f"s{step:02d}g{n:03d}", "", "planned", step) for n in range(GROUPS_PER_STEP)]
            add_groups(db, rows)
        add_groups(db, [(f"e-{n:03d}", "before-1-0", "evaluated", None) for n in range(300)])
        yield db


def add_groups(db: sqlite3.Connection, rows: list[tuple[Any, ...]]) -> None:
    sql = "INSERT INTO groups VALUES (?, 0, 'train', ?, '{}', 1, ?, '', ?)"
    db.executemany(sql, rows)


def soon() -> float:
    return time.time() + 60


def steps_of(groups: set[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for group in groups:
        found[group[:3]] = found.get(group[:3], 0) + 1
    return dict(sorted(found.items()))


def test_nothing_is_held_without_a_request(db: sqlite3.Connection, tmp_path: Path) -> None:
    assert JournalHolds(tmp_path).find_groups(db) == set()


def test_a_page_holds_steps_and_groups(db: sqlite3.Connection, tmp_path: Path) -> None:
    write_hold(tmp_path, "page-1", Hold(soon(), steps=(2, 3), groups=("s09g001",)))
    found = JournalHolds(tmp_path).find_groups(db)
    assert steps_of(found) == {"s02": 60, "s03": 60, "s09": 1}
    release_hold(tmp_path, "page-1")
    assert JournalHolds(tmp_path).find_groups(db) == set()


def test_a_hold_keeps_its_newest_groups_alone(db: sqlite3.Connection, tmp_path: Path) -> None:
    write_hold(tmp_path, "page", Hold(soon(), steps=(1, STEPS)))
    found = JournalHolds(tmp_path).find_groups(db)
    assert steps_of(found) == {"s07": 20, "s08": 60, "s09": 60, "s10": 60}
    named = tuple(f"x{n}" for n in range(1000))
    write_hold(tmp_path, "page", Hold(soon(), groups=named))
    assert len(JournalHolds(tmp_path).find_groups(db)) == MOST_GROUPS


def test_so_many_holds_count_and_no_more(db: sqlite3.Connection, tmp_path: Path) -> None:
    for n in range(MOST_HOLDS + 5):
        write_hold(tmp_path, f"page-{n}", Hold(soon(), groups=(f"g{n}",)))
    found = JournalHolds(tmp_path).find_groups(db)
    assert found == {f"g{n}" for n in range(5, MOST_HOLDS + 5)}


def test_kept_steps_hold_their_newest_groups(db: sqlite3.Connection, tmp_path: Path) -> None:
    holds = JournalHolds(tmp_path)
    holds.kept_steps = 2
    assert steps_of(holds.find_groups(db)) == {"s09": 60, "s10": 60}
    holds.kept_steps = STEPS
    assert len(holds.find_groups(db)) == MOST_GROUPS


def test_what_is_not_dumped_is_held_whole(db: sqlite3.Connection, tmp_path: Path) -> None:
    holds = JournalHolds(tmp_path)
    holds.set_unwritten([1], ["before-1-0"])
    assert steps_of(holds.find_groups(db)) == {"e-0": 100, "e-1": 100, "e-2": 100, "s01": 60}
    holds.set_unwritten([], [])
    assert holds.find_groups(db) == set()


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b"[]",
        b'{"until": "soon"}',
        b"{}",
        b'{"until": 1, "steps": null, "groups": ["g"]}',
        b'{"until": 1e999, "steps": [1e999, 2], "groups": []}',
        # The year 2200: further off than any hold may last.
        json.dumps({**REMOTE, "until": 7_258_118_400}).encode(),
    ],
)
def test_a_hold_that_expired_or_is_none_counts_for_nothing_and_is_removed(
    db: sqlite3.Connection, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / FOLDER / "page.json"
    path.parent.mkdir()
    path.write_bytes(content)
    assert JournalHolds(tmp_path).find_groups(db) == set()
    assert not path.exists()


def test_a_hold_may_name_more_steps_than_there_are(db: sqlite3.Connection, tmp_path: Path) -> None:
    path = tmp_path / FOLDER / "page.json"
    path.parent.mkdir()
    path.write_text(json.dumps({**REMOTE, "until": soon()}))
    assert len(JournalHolds(tmp_path).find_groups(db)) == MOST_GROUPS + 1


@pytest.mark.parametrize("name", ["", "../page", "a/b", ".hidden"])
def test_a_hold_has_a_plain_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="expected letters, digits"):
        write_hold(tmp_path, name, Hold(soon()))


@pytest.mark.parametrize("keep", [False, True])
async def test_a_run_prunes_no_payload_if_it_is_told_to_keep_them(
    tmp_path: Path, *, keep: bool
) -> None:
    changes = {"checkpoint": {"every": 1, "keep": 1}, "journal": {"keep_payloads": keep}}
    await run_to_the_end(tmp_path, **changes)
    [(pruned,)] = query(tmp_path, "SELECT count(*) FROM trajectories WHERE payload IS NULL")
    assert (pruned == 0) == keep
