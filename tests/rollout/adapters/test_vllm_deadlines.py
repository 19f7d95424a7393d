"""Updates of an engine that leaves a call unanswered, as vLLM does when its process has been killed
or stands still."""

import asyncio
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from flotilla_common.domain.policy import PolicyId
from flotilla_rollout.adapters.vllm import VllmEngine
from flotilla_rollout.ports import EngineDead
from flotilla_rollout.types import Publication

LOADING = ("pause", "load_flotilla_weights", "version", "reset", "resume")
RECEIVING = ("init", "pause", "start", "update", "judge_flotilla_transfer", "finish", "version")
PROMPT = np.arange(3, dtype=np.int32)


class SilentLlm:
    """A double of AsyncLLM that answers all calls but one."""

    def __init__(self, silent: str) -> None:
        self.errored = False
        self.reached = asyncio.Event()
        self._silent = silent

    async def pause_generation(self, **options: Any) -> None:
        await self._answer("pause")

    async def collective_rpc(self, name: str, args: Any = ()) -> list[tuple[str, bool]]:
        await self._answer(name)
        return [("", False)]

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self._answer("init")

    async def start_weight_update(self) -> None:
        await self._answer("start")

    async def update_weights(self, request: Any) -> None:
        await self._answer("update")

    async def finish_weight_update(self) -> None:
        await self._answer("finish")

    async def update_weight_version(self, label: str) -> None:
        await self._answer("version")

    async def reset_prefix_cache(self, **options: Any) -> None:
        await self._answer("reset")

    async def resume_generation(self) -> None:
        await self._answer("resume")

    async def _answer(self, call: str) -> None:
        if call == self._silent:
            self.reached.set()
            await asyncio.Future()


def engine_on(llm: SilentLlm) -> VllmEngine:
    return VllmEngine(cast("Any", llm), [1], seeded=True, max_num_seqs=1)


def publication(timeout_s: float) -> Publication:
    policy = PolicyId(1, 1, b"new")
    return Publication(policy, (), 0, "gloo", "localhost:1", PROMPT, timeout_s, reload=True)


async def load(engine: VllmEngine, timeout_s: float) -> None:
    await engine.load_weights(publication(timeout_s), Path())


async def check_serves_nothing(engine: VllmEngine, reason: str) -> None:
    assert engine.policy is None
    assert reason in await engine.wait_until_dead()
    with pytest.raises(EngineDead, match=reason):
        await engine.compute_logprobs(PROMPT)


@pytest.mark.parametrize("call", LOADING)
async def test_an_engine_that_does_not_answer_in_the_publications_time_is_dead(call: str) -> None:
    engine = engine_on(SilentLlm(call))
    reason = "the update to policy .* has not ended after 0.1 s"
    with pytest.raises(EngineDead, match=reason):
        await load(engine, timeout_s=0.1)
    await check_serves_nothing(engine, "has not ended")


@pytest.mark.parametrize("call", LOADING)
async def test_an_engine_that_ends_before_it_answers_is_dead_at_once(call: str) -> None:
    llm = SilentLlm(call)
    engine = engine_on(llm)
    loading = asyncio.create_task(load(engine, timeout_s=3600.0))
    await llm.reached.wait()
    llm.errored = True
    with pytest.raises(EngineDead, match="process has ended"):
        await loading
    await check_serves_nothing(engine, "process has ended")


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("call", RECEIVING)
async def test_an_engine_that_stops_answering_as_it_receives_is_dead(call: str) -> None:
    engine = engine_on(SilentLlm(call))
    with pytest.raises(EngineDead, match="has not ended after"):
        await engine.receive_weights(publication(timeout_s=0.1))
    await check_serves_nothing(engine, "has not ended")


async def test_an_engine_that_answers_serves() -> None:
    engine = engine_on(SilentLlm(""))
    await load(engine, timeout_s=60.0)
    assert engine.policy == PolicyId(1, 1, b"new")
