"""The Tinker engine on the real front door: what it asks for, and what it makes of the answers."""

import asyncio
from collections.abc import AsyncGenerator

import numpy as np
import pytest
import pytest_asyncio

from flotilla_common.domain.policy import PolicyId
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import TinkerConfig
from flotilla_rollout.adapters.tinker_engine import TinkerEngine
from flotilla_rollout.ports import EngineError, TransportFailed
from flotilla_rollout.types import PolicySpan, Publication, Sampling
from flotilla_rollout.work.service_use import ServiceUse
from tests.rollout.adapters.tinker_turns import (
    CANARY,
    COLLECTED,
    PROMPT,
    STOP_ID,
    TinkerStage,
    staged_engine,
)
from tests.support.waiting import until

pytestmark = [COLLECTED, pytest.mark.asyncio(loop_scope="module")]
SAMPLING = Sampling(temperature=1.0, seed=7)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[TinkerStage]:
    async with staged_engine(tmp_path_factory.mktemp("front")) as one:
        yield one


@pytest_asyncio.fixture(loop_scope="module")
async def stage(served: TinkerStage) -> TinkerStage:
    await served.reset()
    return served


async def test_a_turn_is_the_sampled_tokens_with_their_end(stage: TinkerStage) -> None:
    turn = await stage.engine.generate(PROMPT, SAMPLING, 16)

    assert len(turn.token_ids) == 3
    assert turn.token_ids[-1] == STOP_ID
    assert turn.logprobs.tolist() == (-turn.token_ids.astype(np.float32) / 1000).tolist()
    assert turn.spans == (PolicySpan(PolicyId(1, 0), 3),)
    assert not (turn.cut or turn.timed_out or turn.waited_s)


async def test_it_samples_as_it_is_asked(stage: TinkerStage) -> None:
    await stage.engine.generate(PROMPT, Sampling(0.5, 7, top_p=0.9, top_k=20), 16)
    await stage.engine.generate(PROMPT, Sampling(0.0), 16)
    first, greedy = stage.sampler.orders

    assert first.prompt_ids.tolist() == PROMPT.tolist()
    assert (first.temperature, first.top_p, first.top_k) == (0.5, 0.9, 20)
    assert (first.max_tokens, first.stop_ids, first.num_samples) == (16, [STOP_ID], 1)
    assert first.seed in range(2**31)
    assert (greedy.temperature, greedy.top_k, greedy.seed) == (0.0, -1, None)


async def test_each_turn_of_an_attempt_has_a_seed_of_its_own(stage: TinkerStage) -> None:
    for prompt in (PROMPT, np.append(PROMPT, PROMPT)):
        await stage.engine.generate(prompt, SAMPLING, 16)
    first, second = stage.sampler.orders
    assert first.seed != second.seed


async def test_a_turn_at_its_token_limit_is_cut(stage: TinkerStage) -> None:
    turn = await stage.engine.generate(PROMPT, SAMPLING, 2)
    assert (len(turn.token_ids), turn.cut) == (2, True)


async def test_new_weights_answer_new_requests_and_old_ones_those_that_they_began(
    stage: TinkerStage,
) -> None:
    before = await stage.engine.generate(PROMPT, SAMPLING, 16)
    gate = stage.sampler.gate = asyncio.Event()
    begun = asyncio.create_task(stage.engine.generate(PROMPT, SAMPLING, 16))
    await until(lambda: stage.sampler.running == 1)
    policy = await stage.load(1)
    later = asyncio.create_task(stage.engine.generate(PROMPT, SAMPLING, 16))
    await until(lambda: stage.sampler.running == 2)
    gate.set()
    old, new = await begun, await later

    assert stage.engine.policy == policy
    assert (old.spans, new.spans) == (before.spans, (PolicySpan(policy, 3),))
    assert old.token_ids.tolist() == before.token_ids.tolist() != new.token_ids.tolist()


async def test_a_prompt_is_scored(stage: TinkerStage) -> None:
    scores = await stage.engine.compute_logprobs(CANARY)
    assert scores.tolist() == (-CANARY[1:].astype(np.float32) / 100).tolist()


async def test_a_request_past_its_time_is_cancelled_and_has_no_tokens(stage: TinkerStage) -> None:
    stage.sampler.gate = asyncio.Event()
    turn = await stage.engine.generate(PROMPT, SAMPLING, 16, timeout_s=0.5)

    assert (turn.timed_out, len(turn.token_ids), turn.waited_s) == (True, 0, 0.0)
    await until(lambda: stage.sampler.running == 0)
    assert stage.proxy.count("cancel_future") == 1


async def test_tokens_of_answered_requests_are_counted(stage: TinkerStage) -> None:
    await asyncio.gather(*(stage.engine.generate(PROMPT, SAMPLING, 16) for _ in range(3)))
    await stage.engine.compute_logprobs(CANARY)
    assert (stage.use.prompt_tokens, stage.use.sampled_tokens) == (3 * 4 + 3, 3 * 3 + 1)


async def test_a_request_that_the_service_refuses_fails_and_others_go_on(
    stage: TinkerStage,
) -> None:
    with pytest.raises(EngineError, match="the token 5000; the vocabulary has 1000"):
        await stage.engine.generate(np.array([11, 5000], np.int32), SAMPLING, 16)
    assert len((await stage.engine.generate(PROMPT, SAMPLING, 16)).token_ids) == 3


async def test_a_turn_without_its_end_is_refused(stage: TinkerStage) -> None:
    stage.sampler.drops_end = True
    with pytest.raises(EngineError, match="left out the token that ended a turn"):
        await stage.engine.generate(PROMPT, SAMPLING, 16)


async def test_weights_that_the_service_does_not_have_leave_the_old_ones(
    stage: TinkerStage,
) -> None:
    nowhere = "tinker://nobody/sampler_weights/nothing"
    with pytest.raises(TransportFailed, match=nowhere):
        await stage.load(2, nowhere)
    assert stage.engine.policy == PolicyId(1, 0)
    assert (await stage.engine.generate(PROMPT, SAMPLING, 16)).spans[0].policy == PolicyId(1, 0)


async def test_weights_themselves_are_not_taken(stage: TinkerStage) -> None:
    path = stage.folder / "tensors"
    path.write_bytes(b"\0" * 64)
    publication = Publication(PolicyId(1, 1), (), 64, "shared_memory", str(path), CANARY, 20.0)
    with pytest.raises(ConfigError, match=r'is learner\.engine = "tinker"\?'):
        await stage.engine.load_weights(publication, path)


async def test_a_wrong_key_is_a_fault_of_the_configuration(
    stage: TinkerStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-of-nobody-0123456789")
    config = TinkerConfig(url=stage.proxy.url)
    with pytest.raises(ConfigError, match="refuses the key in TINKER_API_KEY"):
        await TinkerEngine.start_engine(config, "run-1", [STOP_ID], ServiceUse())


async def test_the_burn_in_is_a_sample(stage: TinkerStage) -> None:
    answer = await stage.engine.burn_in(PROMPT, 1, 5.0)
    assert (len(answer.token_ids), answer.cut) == (1, True)
    assert await stage.engine.measure_memory() == ()
    assert await stage.engine.identify_devices() == ()
