"""Writes of coroutines share commits, and none waits for ever."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from typing import Any

import pytest

from flotilla_common.files.commit_thread import Batch, CommitThread, run_each


def make_commit(sizes: list[int], gate: threading.Event) -> Callable[[Batch], None]:
    """Commits without a file; `gate` holds the first up."""
    db = sqlite3.connect(":memory:", check_same_thread=False)

    def commit(batch: Batch) -> None:
        gate.wait()
        sizes.append(len(batch))
        for future, result in run_each(batch, lambda work: work(db)):
            future.set_result(result)

    return commit


async def test_what_arrives_during_a_commit_shares_the_next_in_order() -> None:
    sizes, gate, done = list[int](), threading.Event(), list[int]()
    commits = CommitThread("test", make_commit(sizes, gate))
    writes = [asyncio.create_task(commits.run(lambda _, n=n: done.append(n))) for n in range(600)]
    await asyncio.sleep(0.1)
    gate.set()
    await asyncio.gather(*writes)
    commits.close()
    assert done == [*range(600)]
    assert len(sizes) <= 5
    assert max(sizes) == 256


async def test_what_is_queued_is_written_before_it_closes() -> None:
    gate, done = threading.Event(), list[int]()
    commits = CommitThread("test", make_commit([], gate))
    writes = [asyncio.create_task(commits.run(lambda _, n=n: done.append(n))) for n in range(3)]
    await asyncio.sleep(0)
    closing = asyncio.create_task(asyncio.to_thread(commits.close))
    await asyncio.sleep(0.05)
    gate.set()
    await closing
    await asyncio.gather(*writes)
    assert done == [0, 1, 2]


async def test_a_work_that_raises_fails_alone() -> None:
    gate = threading.Event()
    gate.set()
    commits = CommitThread("test", make_commit([], gate))
    with pytest.raises(KeyError):
        await commits.run(lambda _: {}["missing"])
    assert await commits.run(lambda _: 1) == 1
    commits.close()


@pytest.mark.parametrize("error", [sqlite3.OperationalError("disk full"), MemoryError("none")])
async def test_a_commit_that_fails_fails_all_and_all_later_ones(error: Exception) -> None:
    gate, calls = threading.Event(), list[int]()

    def commit(batch: Batch) -> None:
        gate.wait()
        calls.append(len(batch))
        raise error

    commits = CommitThread("test", commit)
    writes: list[Any] = [asyncio.create_task(commits.run(lambda _: 1)) for _ in range(300)]
    await asyncio.sleep(0.05)
    gate.set()
    assert set(await asyncio.gather(*writes, return_exceptions=True)) == {error}
    with pytest.raises(type(error)):
        await asyncio.wrap_future(commits.broken)
    with pytest.raises(type(error)):
        await commits.run(lambda _: 1)
    commits.close()
    # The disk was tried once.
    assert len(calls) == 1


def test_a_full_disk_is_no_single_works_error() -> None:
    def refuse(_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with pytest.raises(sqlite3.OperationalError):
        run_each([(refuse, None)], lambda work: work(None))  # pyright: ignore[reportArgumentType]
