"""The ledger of a collection: what is damaged is said."""

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from flotilla_reading.data.collect.fates import Outcome
from flotilla_reading.data.collect.ledger import Conversation, Ledger, Try, open_ledger
from flotilla_reading.data.entries import DataError


def test_a_collection_that_fails_leaves_nothing_unless_it_has_begun(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with pytest.raises(DataError, match="no gateway"), open_ledger(folder):
        raise DataError("no gateway")
    assert not folder.exists()
    with pytest.raises(DataError, match="no gateway"), open_ledger(folder) as ledger:
        ledger.begin_try("digest", "key", 1)
        raise DataError("no gateway")
    with pytest.raises(DataError, match="no gateway"), open_ledger(folder) as ledger:
        assert len(ledger.tries_of("digest")) == 1
        raise DataError("no gateway")
    with open_ledger(folder) as ledger:
        assert len(ledger.tries_of("digest")) == 1


@pytest.mark.parametrize(
    ("damage", "read"),
    [
        ("DELETE FROM meta WHERE name = 'id'", None),
        ("UPDATE tries SET messages = NULL", Ledger.conversation_of),
        ("UPDATE tries SET messages = '[{'", Ledger.conversation_of),
        ("UPDATE requests SET answer = 'x'", Ledger.turns_of),
        ("DROP TABLE requests", None),
    ],
)
def test_a_damaged_ledger_is_named_with_what_is_wrong(
    tmp_path: Path, damage: str, read: Callable[[Ledger, Try], object] | None
) -> None:
    with open_ledger(tmp_path) as ledger:
        one = ledger.begin_try("digest", "key", 1)
        ledger.end_request(ledger.begin_request(one, 0, "asked"), {"text": "done"}, (3, 1))
        ledger.end_try(one, Outcome(1.0, "", None), "", Conversation([], None))
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as db:
        db.execute(damage)
        db.commit()
    with pytest.raises(DataError, match=r"ledger\.sqlite"), open_ledger(tmp_path) as ledger:
        assert read is not None
        read(ledger, one)
