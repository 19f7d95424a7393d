"""One learner at a time writes to a journal, whatever became of the lock."""

import asyncio
from pathlib import Path

import pytest

from flotilla_common.run_folder.journal_file import JournalError
from flotilla_learner.journal.store import Journal, open_journal
from flotilla_learner.journal.writer import StaleEpochError


async def taken_over(run_dir: Path) -> tuple[Journal, Journal]:
    """A journal that one writer opens, and then another."""
    first = open_journal(run_dir)
    await first.begin_epoch(at_least=1)
    # What a file system without locks, or a careless hand, comes down to.
    (run_dir / "journal.lock").unlink()
    second = open_journal(run_dir)
    await second.begin_epoch(at_least=1)
    return first, second


async def test_a_second_learner_is_refused(tmp_path: Path) -> None:
    journal = open_journal(tmp_path)
    with pytest.raises(JournalError, match=r"another learner works on .*; stop it"):
        open_journal(tmp_path)
    await journal.close()
    await open_journal(tmp_path).close()


async def test_every_start_begins_a_newer_epoch(tmp_path: Path) -> None:
    for epoch in (1, 2, 3):
        journal = open_journal(tmp_path)
        assert await journal.begin_epoch(at_least=1) == epoch
        await journal.close()


async def test_a_learner_of_an_older_epoch_writes_nothing_any_more(tmp_path: Path) -> None:
    first, second = await taken_over(tmp_path)
    with pytest.raises(StaleEpochError, match="in epoch 2: this one, of epoch 1, ends"):
        await first.set_meta({"seconds": 1})
    with pytest.raises(StaleEpochError):
        await first.begin_epoch(at_least=1)
    assert "seconds" not in await second.read_meta()
    await second.set_meta({"seconds": 2})
    assert (await first.read_meta())["seconds"] == 2
    await first.close()
    await second.close()


async def test_a_learner_of_an_older_epoch_learns_that_it_is_over(tmp_path: Path) -> None:
    first, second = await taken_over(tmp_path)
    watching = asyncio.create_task(first.wait_until_broken())
    with pytest.raises(StaleEpochError):
        await first.run_fenced(lambda: None)
    with pytest.raises(StaleEpochError):
        await asyncio.wait_for(watching, 5)
    await first.close()
    await second.close()


async def test_what_is_fenced_is_not_done_by_an_older_epoch(tmp_path: Path) -> None:
    first, second = await taken_over(tmp_path)
    done: list[str] = []
    with pytest.raises(StaleEpochError):
        await first.run_fenced(lambda: done.append("first"))
    await second.run_fenced(lambda: done.append("second"))
    assert done == ["second"]
    await first.close()
    await second.close()


async def test_writes_that_wait_when_a_newer_epoch_begins_all_fail(tmp_path: Path) -> None:
    first, second = await taken_over(tmp_path)
    writes = [first.set_meta({f"key{n}": n}) for n in range(20)]
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert {type(result) for result in results} == {StaleEpochError}
    assert set(await second.read_meta()) == {"schema_version", "run_id"}
    await first.close()
    await second.close()
