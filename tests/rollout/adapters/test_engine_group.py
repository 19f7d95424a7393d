"""Several engines of a replica behave like one."""

import asyncio
from collections.abc import Sequence
from math import inf
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from flotilla_common.domain.policy import PolicyId
from flotilla_common.images.picture import ShownPicture
from flotilla_rollout.adapters.engine_group import EngineGroup
from flotilla_rollout.ports import EngineDead, EngineError, TransportFailed, WeightsTorn
from flotilla_rollout.types import Completion, MemoryPeak, PolicySpan, Publication, Sampling

PROMPT = np.arange(3, dtype=np.int32)
OLD, NEW = PolicyId(1, 1, b"old"), PolicyId(1, 2, b"new")
LONG_S = 60.0


class Engine:
    """An engine whose turns end on request."""

    def __init__(self, policy: PolicyId | None = OLD) -> None:
        self.policy = policy
        self.running: list[int] = []
        self.go = asyncio.Event()
        self.dead: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.score = 0.0
        self.torn = False
        self.refusal: Exception | None = None
        self.tried: list[int] = []
        self.reach = 8
        self.closed = False

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        max_tokens: int,
        timeout_s: float = inf,
        pictures: Sequence[ShownPicture] = (),
    ) -> Completion:
        self.running.append(sampling.seed)
        await self.go.wait()
        assert self.policy is not None
        one = np.ones(1, np.int32)
        return Completion(one, -np.ones(1, np.float32), (PolicySpan(self.policy, 1),), cut=False)

    async def load_weights(self, publication: Publication, path: Path) -> None:
        if self.torn:
            self.policy = None
            raise EngineDead("torn")
        self.policy = publication.policy

    async def receive_weights(self, publication: Publication) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.policy = publication.policy

    async def compute_logprobs(
        self, token_ids: NDArray[np.int32], pictures: Sequence[ShownPicture] = ()
    ) -> NDArray[np.float32]:
        return np.full(len(token_ids) - 1, self.score, np.float32)

    async def burn_in(
        self,
        token_ids: NDArray[np.int32],
        max_tokens: int,
        timeout_s: float,
        pictures: Sequence[ShownPicture] = (),
    ) -> Completion:
        self.tried.append(max_tokens)
        assert self.policy is not None
        span = PolicySpan(self.policy, self.reach)
        ids, logprobs = np.ones(self.reach, np.int32), -np.ones(self.reach, np.float32)
        return Completion(ids, logprobs, (span,), cut=True)

    async def measure_memory(self) -> Sequence[MemoryPeak]:
        return [MemoryPeak(host=self.reach)]

    async def identify_devices(self) -> Sequence[str]:
        return [f"device {self.reach}"]

    async def wait_until_dead(self) -> str:
        return await self.dead

    async def close(self) -> None:
        self.closed = True


def grouped(engines: Sequence[Engine], each: int = 2) -> EngineGroup:
    return EngineGroup(engines, max_num_seqs=each, dtype="float32")


def publication() -> Publication:
    return Publication(NEW, (), 0, "shm", "", PROMPT, 1.0)


async def begin(group: EngineGroup, *seeds: int) -> list[asyncio.Task[Completion]]:
    turns = [asyncio.create_task(group.generate(PROMPT, Sampling(1.0, s), 8)) for s in seeds]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return turns


async def test_attempts_are_spread_and_stay_where_their_prefix_lies() -> None:
    engines = [Engine(), Engine()]
    group = grouped(engines)
    first = await begin(group, 1, 2, 3, 4)
    assert [engine.running for engine in engines] == [[1, 3], [2, 4]]
    for engine in engines:
        engine.go.set()
    await asyncio.gather(*first)
    await asyncio.gather(*await begin(group, 4, 2, 3))
    assert [engine.running[2:] for engine in engines] == [[3], [4, 2]]


async def test_an_attempt_moves_where_its_engine_is_full_and_waits_where_all_are() -> None:
    engines = [Engine(), Engine()]
    group = grouped(engines, each=1)
    engines[0].go.set()
    await asyncio.gather(*await begin(group, 1))
    engines[0].go.clear()
    turns = await begin(group, 2, 1, 3)
    assert [engine.running for engine in engines] == [[1, 2], [1]]
    engines[1].go.set()
    await asyncio.wait_for(turns[1], LONG_S)
    await asyncio.wait_for(turns[2], LONG_S)
    assert engines[1].running == [1, 3]
    engines[0].go.set()
    await turns[0]


async def test_a_turn_that_gets_no_slot_in_its_time_is_empty() -> None:
    engine = Engine()
    group = grouped([engine], each=1)
    turns = await begin(group, 1)
    late = await group.generate(PROMPT, Sampling(1.0, 2), 8, timeout_s=0.01)
    assert (len(late.token_ids), late.timed_out, engine.running) == (0, True, [1])
    engine.go.set()
    await turns[0]


async def test_weights_reach_every_engine_and_the_oldest_policy_is_reported() -> None:
    engines = [Engine(), Engine()]
    group = grouped(engines)
    engines[1].policy = NEW
    assert group.policy == OLD
    await group.load_weights(publication(), Path())
    assert [engine.policy for engine in engines] == [NEW, NEW]
    assert group.policy == NEW
    assert grouped([Engine(), Engine(None)]).policy is None


async def test_one_engine_that_is_torn_tears_them_all() -> None:
    engines = [Engine(), Engine()]
    engines[1].torn = True
    group = grouped(engines)
    with pytest.raises(EngineDead, match="torn"):
        await group.load_weights(publication(), Path())
    assert group.policy is None


async def test_a_canary_is_scored_by_all_and_refused_where_they_differ() -> None:
    engines = [Engine(), Engine(), Engine()]
    group = grouped(engines)
    engines[2].score = -1e-4
    assert (await group.compute_logprobs(PROMPT)).tolist() == [0.0, 0.0]
    for score in (-0.5, float("nan")):
        engines[2].score = score
        with pytest.raises(EngineError, match="engine 2 of this replica differs from engine 0"):
            await group.compute_logprobs(PROMPT)


async def test_the_first_death_is_reported_with_its_engine() -> None:
    engines = [Engine(), Engine()]
    group = grouped(engines)
    engines[1].dead.set_result("it has ended")
    assert await group.wait_until_dead() == "engine 1 of this replica: it has ended"
    await group.close()
    assert all(engine.closed for engine in engines)


async def test_every_engine_is_burnt_in_and_the_shortest_answer_decides() -> None:
    engines = [Engine(), Engine()]
    engines[1].reach = 3
    group = EngineGroup(engines, max_num_seqs=1, dtype="float32")
    answer = await group.burn_in(PROMPT, 8, LONG_S)
    assert [engine.tried for engine in engines] == [[8], [8]]
    assert len(answer.token_ids) == 3
    assert [peak.host for peak in await group.measure_memory()] == [8, 3]
    assert await group.identify_devices() == ["device 8", "device 3"]


async def test_of_engines_that_are_sent_weights_the_worst_failure_counts() -> None:
    engines = [Engine(), Engine(), Engine()]
    group = grouped(engines)
    engines[1].refusal = TransportFailed("refused")
    with pytest.raises(TransportFailed):
        await group.receive_weights(publication())
    assert [engine.policy for engine in engines] == [NEW, OLD, NEW]
    engines[0].refusal = WeightsTorn("torn")
    with pytest.raises(WeightsTorn):
        await group.receive_weights(publication())
    engines[2].refusal = EngineDead("dead")
    with pytest.raises(EngineDead):
        await group.receive_weights(publication())
