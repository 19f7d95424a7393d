"""Connections to Fleet that are cut anywhere, in a request or in its answer, or stand still."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest

from flotilla_common.domain.attempts import ToolOutcome
from tests.env_gateway.backends.bench import Bench
from tests.env_gateway.backends.fleet_harness import Emulator, fleet_bench

EPISODES = 24
READS = ("search_hotels", "find_bookings")
SECTION = {"limits": {"max_creating": 8}, "retry": {"budget_cap": 500}}


@dataclass
class Line:
    """Passes bytes on between sockets; of every hundred pieces `percent` end badly."""

    port: int
    rng: random.Random
    percent: int = 6
    cuts: int = 0
    _pumps: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pump = asyncio.create_task(self._connect(reader, writer))
        self._pumps.add(pump)
        pump.add_done_callback(self._pumps.discard)

    async def close(self) -> None:
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            await asyncio.gather(self._pass(reader, far_writer), self._pass(far_reader, writer))
        finally:
            writer.close()
            far_writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(2**16):
                kept = await self._kept(data)
                writer.write(kept)
                await writer.drain()
                if len(kept) < len(data) or self._strikes():
                    break
        writer.close()

    async def _kept(self, data: bytes) -> bytes:
        if not self._strikes():
            return data
        end = self.rng.choice(("nothing", "half", "late"))
        if end == "late":
            await asyncio.sleep(self.rng.random())
            return data
        return b"" if end == "nothing" else data[: len(data) // 2]

    def _strikes(self) -> bool:
        strikes = self.rng.random() * 100 < self.percent
        self.cuts += strikes
        return strikes


@asynccontextmanager
async def bad_line(emulator: Emulator, seed: int) -> AsyncGenerator[tuple[Bench, Line]]:
    port = urlsplit(emulator.url).port
    assert port is not None
    line = Line(port, random.Random(seed))
    server = await asyncio.start_server(line.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        async with fleet_bench(emulator, section=SECTION, url=url) as bench:
            yield bench, line
            # For the remaining deletions, when the gateway drains.
            line.percent = 0
    finally:
        server.close()
        await line.close()


async def episode(
    bench: Bench, attempt: int, reported: Counter[tuple[str, ToolOutcome]]
) -> float | None:
    """Return the grade, if any. Ends with the first unanswered call."""
    session = await bench.open(attempt, task=attempt % 3, group_id=f"group-{attempt}")
    for call in bench.harness.solution(attempt % 3):
        answer = await bench.call(session, call)
        reported[call[0], answer.outcome] += 1
        if answer.outcome is not ToolOutcome.OK:
            break
    grade = await bench.grade(session)
    assert grade.reward is None or not session.episode.tainted, grade
    bench.gateway.close(session.episode.episode_id)
    return grade.reward


@pytest.mark.parametrize("seed", [1, 2])
async def test_no_write_is_done_twice_no_grade_is_wrong_and_nothing_is_left(
    emulator: Emulator, seed: int
) -> None:
    reported: Counter[tuple[str, ToolOutcome]] = Counter()
    async with bad_line(emulator, seed) as (bench, line):
        rewards = await asyncio.gather(*(episode(bench, n, reported) for n in range(EPISODES)))
        assert line.cuts > 10
        assert set(rewards) <= {1.0, None} and rewards.count(1.0) > EPISODES // 2
        executed: dict[str, int] = (await emulator.count())["tools"]
    assert {outcome for _, outcome in reported} <= {ToolOutcome.OK, ToolOutcome.OUTCOME_UNKNOWN}
    for name in executed.keys() - set(READS):
        sure = reported[name, ToolOutcome.OK]
        assert sure <= executed[name] <= sure + reported[name, ToolOutcome.OUTCOME_UNKNOWN]
