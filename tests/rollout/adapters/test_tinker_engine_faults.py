"""The Tinker engine through failures of the service: what waits, what is opened again, what ends
it."""

import asyncio
from collections.abc import AsyncGenerator, Generator
from math import inf

import httpx
import numpy as np
import pytest
import pytest_asyncio

from flotilla_common.domain.policy import PolicyId
from flotilla_common.spec.spec import TinkerConfig
from flotilla_rollout.adapters import tinker_engine
from flotilla_rollout.adapters.tinker_engine import TinkerEngine
from flotilla_rollout.ports import EngineDead, EngineError, RequestAborted
from flotilla_rollout.types import Completion, Sampling
from flotilla_rollout.work.service_use import ServiceUse
from tests.rollout.adapters.tinker_turns import (
    CANARY,
    COLLECTED,
    PROMPT,
    STOP_ID,
    TinkerStage,
    staged_engine,
)
from tests.support.tinker_front import KEY
from tests.support.waiting import until

pytestmark = [COLLECTED, pytest.mark.asyncio(loop_scope="module")]
PAUSED = {"type": "try_again", "queue_state": "paused_capacity", "queue_state_reason": "full"}


@pytest.fixture(autouse=True, scope="module")
def quick_looks() -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tinker_engine, "LOOK_S", 0.02)
        patch.setattr(tinker_engine, "PAUSE_S", 0.05)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    quick_looks: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[TinkerStage]:
    async with staged_engine(tmp_path_factory.mktemp("front")) as one:
        yield one


@pytest_asyncio.fixture(loop_scope="module")
async def stage(served: TinkerStage) -> TinkerStage:
    await served.reset()
    return served


def _ask(stage: TinkerStage, timeout_s: float = 60.0, seed: int = 7) -> "asyncio.Task[Completion]":
    sampling = Sampling(temperature=1.0, seed=seed)
    return asyncio.create_task(stage.engine.generate(PROMPT, sampling, 16, timeout_s))


async def _begin(stage: TinkerStage) -> "asyncio.Task[Completion]":
    """Begin a request that the engine answers only when its gate is set."""
    stage.sampler.gate = asyncio.Event()
    asked = _ask(stage)
    await until(lambda: stage.sampler.running == 1)
    return asked


def _open_gate(stage: TinkerStage) -> None:
    assert stage.sampler.gate is not None
    stage.sampler.gate.set()
    stage.sampler.gate = None


@pytest.mark.parametrize(
    ("call", "status"),
    [
        *(("asample", status) for status in (402, 408, 409, 429, 500, 503)),
        *(("retrieve_future", status) for status in (408, 409, 429, 500, 503)),
    ],
)
async def test_a_refusal_for_now_is_waited_for(stage: TinkerStage, call: str, status: int) -> None:
    stage.proxy.refuse(call, status)
    assert len((await _ask(stage)).token_ids) == 3
    assert stage.proxy.count(call) == 2


@pytest.mark.parametrize("carried_out", [False, True])
@pytest.mark.parametrize("call", ["asample", "retrieve_future"])
async def test_a_lost_connection_costs_nothing(
    stage: TinkerStage, call: str, *, carried_out: bool
) -> None:
    stage.proxy.drop(call, carried_out=carried_out)
    assert len((await _ask(stage)).token_ids) == 3
    # It was sampled once.
    assert len(stage.sampler.orders) == 1


async def test_a_result_that_is_gone_is_sampled_again(stage: TinkerStage) -> None:
    stage.proxy.refuse("retrieve_future", 410)
    assert len((await _ask(stage)).token_ids) == 3
    assert stage.proxy.count("asample") == 2
    assert stage.proxy.count("create_*") == 0


@pytest.mark.parametrize("status", [404, 410])
async def test_a_sampler_that_is_gone_is_opened_again(stage: TinkerStage, status: int) -> None:
    stage.proxy.refuse("asample", status)
    assert (await _ask(stage)).spans[0].policy == PolicyId(1, 0)
    assert stage.proxy.count("create_sampling_session") == 1
    assert stage.proxy.count("create_session") == 0


async def test_a_session_that_ends_is_opened_again_and_its_requests_go_on(
    stage: TinkerStage,
) -> None:
    before = await _ask(stage)
    asked = await _begin(stage)
    more = [_ask(stage, seed=seed) for seed in range(3)]
    await _finish_session(stage)
    _open_gate(stage)
    after = await asyncio.gather(asked, *more, _ask(stage))

    for each in after:
        assert each.token_ids.tolist() == before.token_ids.tolist()
        assert each.spans == before.spans
    assert stage.proxy.count("create_session") == 1


async def test_weights_are_loaded_into_a_new_session_if_the_old_one_ended(
    stage: TinkerStage,
) -> None:
    await _finish_session(stage)
    policy = await stage.load(1)
    assert (await _ask(stage)).spans[0].policy == policy
    assert stage.proxy.count("create_session") == 1


async def test_a_sampler_that_is_always_gone_fails_its_request(stage: TinkerStage) -> None:
    stage.proxy.refuse("asample", 410, times=inf)
    with pytest.raises(EngineError, match="lost the samplers of a request 3 times"):
        await _ask(stage)
    stage.proxy.heal()
    assert len((await _ask(stage)).token_ids) == 3


async def test_an_outage_is_told_and_its_requests_are_answered_after_it(stage: TinkerStage) -> None:
    asked = await _begin(stage)
    stage.proxy.go_down()
    later = _ask(stage)
    await until(lambda: stage.use.waiting_s(asyncio.get_running_loop().time()) > 0.5)
    assert "onnect" in stage.use.reason
    stage.proxy.heal()
    _open_gate(stage)
    for answer in await asyncio.gather(asked, later):
        assert len(answer.token_ids) == 3
        assert answer.waited_s > 0.5
    assert stage.use.reason == ""
    assert len(stage.sampler.orders) == 2


async def test_time_that_runs_out_in_an_outage_is_not_the_policys(stage: TinkerStage) -> None:
    stage.proxy.go_down()
    with pytest.raises(RequestAborted, match="time ran out while the Tinker service was away: "):
        await _ask(stage, timeout_s=0.3)


async def test_a_burn_in_waits_for_the_service(stage: TinkerStage) -> None:
    stage.proxy.go_down()
    testing = asyncio.create_task(stage.engine.burn_in(PROMPT, 1, 0.5))
    await until(lambda: stage.proxy.count("asample") >= 2)
    stage.proxy.heal()
    assert len((await testing).token_ids) == 1


async def test_a_pause_of_the_service_is_told_with_its_reason(stage: TinkerStage) -> None:
    stage.proxy.refuse("retrieve_future", 408, times=inf, body=PAUSED)
    asked = _ask(stage, timeout_s=20.0)
    await until(lambda: stage.use.reason == "the Tinker service is paused_capacity: full")
    stage.proxy.heal()
    assert len((await asked).token_ids) == 3
    assert stage.use.reason == ""


async def test_weights_are_loaded_once_the_service_answers(stage: TinkerStage) -> None:
    stage.proxy.go_down()
    loading = asyncio.create_task(stage.load(1))
    await until(lambda: stage.use.reason != "")
    assert stage.engine.policy == PolicyId(1, 0)
    stage.proxy.heal()
    assert await loading == stage.engine.policy


async def test_it_starts_once_the_service_answers(
    stage: TinkerStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tinker_engine, "SAY_FIRST_S", 0.0)
    stage.proxy.go_down()
    config, use = TinkerConfig(url=stage.proxy.url), ServiceUse()
    starting = asyncio.create_task(TinkerEngine.start_engine(config, "run-2", [STOP_ID], use))
    await until(lambda: stage.proxy.count("client/config") > 0)
    await until(lambda: use.reason.startswith("no session could be opened yet: Connection error."))
    stage.proxy.heal()
    engine = await starting
    await until(lambda: use.reason == "")
    await engine.close()


async def test_patience_ends(stage: TinkerStage, monkeypatch: pytest.MonkeyPatch) -> None:
    config, use = TinkerConfig(url=stage.proxy.url), ServiceUse()
    stage.engine, kept = await TinkerEngine.start_engine(config, "r", [STOP_ID], use), stage.engine
    try:
        await stage.load(0)
        # The start has taken longer.
        monkeypatch.setattr(stage.engine, "_config", config.model_copy(update={"patience_s": 0.3}))
        stage.proxy.go_down()
        asked = _ask(stage)
        reason = await stage.engine.wait_until_dead()
        assert "has answered nobody for 0.3 s (policy.tinker.patience_s): " in reason
        with pytest.raises(EngineDead, match="patience_s"):
            await _ask(stage)
        asked.cancel()
        stage.proxy.heal()
        await stage.engine.close()
    finally:
        stage.engine = kept


async def test_a_key_that_is_refused_ends_the_engine(stage: TinkerStage) -> None:
    config, use = TinkerConfig(url=stage.proxy.url), ServiceUse()
    stage.engine, kept = await TinkerEngine.start_engine(config, "r", [STOP_ID], use), stage.engine
    try:
        await stage.load(0)
        stage.proxy.refuse("asample", 401)
        with pytest.raises(EngineDead, match="refuses the key in TINKER_API_KEY"):
            await _ask(stage)
        assert "refuses the key" in await stage.engine.wait_until_dead()
        await stage.engine.close()
    finally:
        stage.engine = kept


async def test_many_requests_go_through_many_faults(stage: TinkerStage) -> None:
    first = await _ask(stage)
    for call in ("asample", "retrieve_future"):
        stage.proxy.drop(call, times=2)
        stage.proxy.drop(call, times=2, carried_out=True)
        stage.proxy.refuse(call, 410, times=2)
        stage.proxy.refuse(call, 503, times=2)
    asked = [_ask(stage, seed=seed) for seed in range(8)]
    loaded = asyncio.create_task(stage.load(1))
    await asyncio.sleep(0.05)
    asked += [_ask(stage, seed=seed) for seed in range(8, 16)]
    answers = await asyncio.gather(*asked)
    policy = await loaded
    second = await _ask(stage)

    expected = {PolicyId(1, 0): first.token_ids.tolist(), policy: second.token_ids.tolist()}
    for answer in answers:
        [span] = answer.spans
        assert span.policy is not None
        assert answer.token_ids.tolist() == expected[span.policy]
    assert stage.use.sampled_tokens == 18 * 3
    assert (await stage.engine.compute_logprobs(CANARY)).dtype == np.float32


async def _finish_session(stage: TinkerStage) -> None:
    """End the engine's session, as a service does with one that it has not heard of for long."""
    await stage.load(0)
    sampler = [name for name in stage.proxy.calls if name.startswith("samplers/")][-1]
    session = sampler.removeprefix("samplers/").partition(":")[0]
    async with httpx.AsyncClient(headers={"X-API-Key": KEY}) as http:
        answer = await http.post(
            f"{stage.proxy.upstream}/api/v1/sessions/{session}/finish",
            json={"reason": {"type": "success"}},
        )
    assert answer.status_code == 200
