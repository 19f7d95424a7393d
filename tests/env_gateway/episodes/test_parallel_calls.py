"""Calls of one episode in any order of arrival: readers together, writers in their order."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_common.domain.attempts import ToolOutcome
from flotilla_env_gateway.episodes.episode_book import ANSWERS_KEPT, CallSeqError
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.ports import BackendError, CallAnswer, CallResult, Text
from tests.support.examples import examples
from tests.support.fake_environments import TOOLS, ScriptedBackend
from tests.support.fake_gateway import opened, running
from tests.support.waiting import until

LOOK, ADD = TOOLS


class Shelf(ScriptedBackend):
    """An environment whose reads may be under way together; it sees who is inside at once."""

    def __init__(self) -> None:
        super().__init__()
        self.tools = (replace(LOOK, parallel=True), ADD)
        self.hook = self.visit
        self.inside: list[str] = []
        self.begun: list[int] = []
        self.most = 0
        self.release = asyncio.Event()
        self.release.set()

    async def visit(self, name: str, arguments: Mapping[str, Any]) -> CallResult:
        self.inside.append(name)
        self.most = max(self.most, len(self.inside))
        self.begun.append(arguments["number"])
        assert self.inside == ["add"] or "add" not in self.inside
        try:
            await self.release.wait()
            await asyncio.sleep(0)
        finally:
            self.inside.remove(name)
        return CallResult((Text(str(arguments["number"])),))


async def call(
    gateway: Gateway, session: Session, seq: int, name: str = "look", timeout_s: float = 5.0
) -> tuple[CallAnswer, bool]:
    return await gateway.call_tool(session, seq, name, f'{{"number": {seq}}}', timeout_s)


Turn = st.lists(st.booleans(), min_size=1, max_size=24)


@settings(max_examples=examples(60), deadline=None)
@given(Turn, st.randoms(use_true_random=False))
def test_every_order_of_arrival_within_a_run_of_reads_is_executed_once(
    reads: list[bool], rng: Any
) -> None:
    async def play() -> None:
        shelf = Shelf()
        async with running(shelf) as gateway:
            session = await opened(gateway)
            for run in _runs(reads):
                rng.shuffle(run)
                # A repeat of each is on its way, too.
                requests = [*run, *run]
                answers = await asyncio.gather(
                    *(call(gateway, session, seq, _name(reads, seq)) for seq in requests)
                )
                texts = [answer.parts[0] for answer, _ in answers]
                assert texts == [Text(str(seq)) for seq in requests]
                replayed = [replayed for _, replayed in answers]
                assert replayed == [seq >= len(run) for seq in range(len(requests))]
            assert sorted(shelf.begun) == list(range(len(reads)))
            writes = [seq for seq in shelf.begun if not reads[seq]]
            assert writes == sorted(writes)
            for seq in writes:
                assert set(shelf.begun[: shelf.begun.index(seq)]) == set(range(seq))

    asyncio.run(play())


def _name(reads: list[bool], seq: int) -> str:
    return "look" if reads[seq] else "add"


def _runs(reads: list[bool]) -> list[list[int]]:
    """Split numbers of calls into groups that a client has under way together."""
    runs: list[list[int]] = []
    for seq, read in enumerate(reads):
        joins = runs and read and reads[runs[-1][-1]] and len(runs[-1]) < ANSWERS_KEPT
        if joins:
            runs[-1].append(seq)
        else:
            runs.append([seq])
    return runs


async def test_a_read_that_comes_early_waits_for_the_write_before_it() -> None:
    shelf = Shelf()
    async with running(shelf) as gateway:
        session = await opened(gateway)
        early = asyncio.create_task(call(gateway, session, 2))
        await asyncio.sleep(0.01)
        assert shelf.begun == []
        with pytest.raises(CallSeqError, match="call_seq 1 where 0 is next"):
            await call(gateway, session, 1, "add")
        await call(gateway, session, 0, "add")
        await asyncio.sleep(0.01)
        assert shelf.begun == [0]
        await call(gateway, session, 1, "add")
        assert (await early)[1] is False
        assert shelf.begun == [0, 1, 2]


async def test_a_write_waits_for_the_reads_before_it_and_reads_do_not_overtake_it() -> None:
    shelf = Shelf()
    shelf.release.clear()
    async with running(shelf) as gateway:
        session = await opened(gateway)
        names = ["look", "look", "add", "look"]
        calls = [asyncio.create_task(call(gateway, session, *item)) for item in enumerate(names)]
        await until(lambda: len(shelf.inside) == 2)
        await asyncio.sleep(0.01)
        assert shelf.begun == [0, 1]
        shelf.release.set()
        await asyncio.gather(*calls)
        assert (shelf.begun, shelf.most) == ([0, 1, 2, 3], 2)


@pytest.mark.parametrize(
    ("seq", "name"),
    [(1, "add"), (1, "unknown"), (ANSWERS_KEPT, "look"), (10**6, "look")],
)
async def test_what_comes_too_early_is_refused(seq: int, name: str) -> None:
    async with running(Shelf()) as gateway:
        session = await opened(gateway)
        with pytest.raises(CallSeqError):
            await call(gateway, session, seq, name)
        assert (session.episode.next_seq, session.early) == (0, {})


async def test_a_read_whose_predecessor_never_comes_ends_in_time_and_holds_up_no_grade() -> None:
    shelf = Shelf()
    async with running(shelf) as gateway:
        session = await opened(gateway)
        late = asyncio.create_task(call(gateway, session, 1, timeout_s=1.0))
        await asyncio.sleep(0.01)
        assert (await gateway.grade_episode(session, None, None, 5.0)).reward == 1.0
        assert not late.done()
        answer, _ = await late
        assert answer.outcome is ToolOutcome.DEADLINE
        # Its place in line goes unused, and everything else continues.
        await call(gateway, session, 0, "add")
        await call(gateway, session, 2, "add")
        assert shelf.begun == [0, 2]


async def test_a_read_that_fails_costs_the_episode_but_not_those_beside_it() -> None:
    shelf = Shelf()
    shelf.fail_at("call", BackendError("http", "for the test", delivered=None, invalid=True))
    async with running(shelf) as gateway:
        session = await opened(gateway)
        (failed, _), (fine, _) = await asyncio.gather(
            call(gateway, session, 0), call(gateway, session, 1)
        )
        assert (failed.outcome, fine.outcome) == (ToolOutcome.SESSION_LOST, ToolOutcome.OK)
        assert (await gateway.grade_episode(session, None, None, 5.0)).reward is None


async def test_closing_an_episode_ends_its_calls_and_those_that_came_early() -> None:
    shelf = Shelf()
    shelf.release.clear()
    async with running(shelf) as gateway:
        session = await opened(gateway)
        calls = [asyncio.create_task(call(gateway, session, seq)) for seq in (0, 1, 3)]
        await until(lambda: len(shelf.inside) == 2)
        gateway.close(session.episode.episode_id)
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(end).__name__ for end in ends] == ["EpisodeLostError"] * 3
        assert shelf.inside == []
