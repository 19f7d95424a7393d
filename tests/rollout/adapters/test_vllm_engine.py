"""Real vLLM on a tiny random model: its logprobs are those of the weights, however these come.

One engine serves the quick tests of this module, in their order; the last one ends it."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray
from transformers import PreTrainedModel

from flotilla_common.domain.policy import PolicyId
from flotilla_rollout.adapters import vllm
from flotilla_rollout.adapters.vllm import VllmEngine
from flotilla_rollout.adapters.vllm_requests import run_request
from flotilla_rollout.ports import EngineDead
from flotilla_rollout.types import Completion, Publication, Sampling
from tests.rollout.adapters.real_attempts import (
    check_attempt_that_time_cuts,
    check_thinking_budget,
)
from tests.rollout.adapters.test_vllm_transfer import (
    Served,
    check_received,
    check_torn_transfer,
)
from tests.rollout.adapters.tiny_engines import PROMPT, TOLERANCE, tiny_config, tiny_served
from tests.support.process_forge import ProcessForge
from tests.support.tiny_model import (
    load_model,
    make_sparse_model,
    perturbed,
    publish,
    reference_logprobs,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.engine,
    pytest.mark.timeout(280),
    # What vLLM and torch warn about at import is theirs to mend.
    pytest.mark.filterwarnings("default"),
]


def difference(
    reference: NDArray[np.float32], completion: Completion, tokens: slice = slice(None)
) -> float:
    """Largest distance between the engine's logprobs and a reference over the whole sequence."""
    expected = reference[len(PROMPT) - 1 :]
    return float(np.abs(completion.logprobs - expected)[tokens].max())


def check_switch(
    completion: Completion, before: PolicyId, after: PolicyId, model: PreTrainedModel
) -> None:
    """Check that the first span, and no token of the second, is of the old weights."""
    assert [span.policy for span in completion.spans] == [before, after]
    switch = completion.spans[0].length
    assert switch + completion.spans[1].length == len(completion.token_ids)
    whole = np.concatenate([PROMPT, completion.token_ids])
    old = reference_logprobs(model, whole)
    assert difference(old, completion, slice(None, switch)) < TOLERANCE
    distance = difference(old, completion, slice(switch, switch + 5))
    assert distance > 10 * TOLERANCE, "the span is not exact"


def first_span_error(completion: Completion, models: list[PreTrainedModel]) -> float:
    """Return the error of the first policy's logprobs against those of its weights alone."""
    span = completion.spans[0]
    assert span.policy is not None
    whole = np.concatenate([PROMPT, completion.token_ids[: span.length]])
    reference = reference_logprobs(models[span.policy.version % 2], whole)
    return float(np.abs(reference[len(PROMPT) - 1 :] - completion.logprobs[: span.length]).max())


# Tried until a turn has begun and is cut: the speed of this machine is unknown.
TIMES_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)


async def cut_at(
    engine: VllmEngine, timeout_s: float, update: Publication | None = None
) -> list[Completion]:
    """Return the cut ones of more requests than run at once, after `timeout_s`; the weights change
    halfway."""
    requests = [
        asyncio.create_task(engine.generate(PROMPT, Sampling(1.0, seed), 900, timeout_s))
        for seed in range(24)
    ]
    if update is not None:
        await asyncio.sleep(timeout_s / 2)
        await engine.load_weights(update, Path(update.location))
    ended = await asyncio.wait_for(asyncio.gather(*requests), timeout_s + 5)
    assert all(each.timed_out for each in ended if not len(each.token_ids))
    return [each for each in ended if each.timed_out and len(each.token_ids)]


async def check_what_time_cuts(
    engine: VllmEngine, models: list[PreTrainedModel], folder: Path, version: int
) -> None:
    """Tokens that vLLM returns when it aborts are as good to train on as any. `models` are those
    of even and odd versions."""
    model = models[version % 2]
    for timeout_s in TIMES_S:
        cut = await cut_at(engine, timeout_s)
        for each in cut:
            assert [(s.policy, s.length) for s in each.spans] == [
                (engine.policy, len(each.token_ids))
            ]
            whole = np.concatenate([PROMPT, each.token_ids])
            assert difference(reference_logprobs(model, whole), each) < TOLERANCE
        if cut:
            break
    else:
        raise AssertionError("no turn was cut")
    for later, timeout_s in enumerate(TIMES_S, version + 1):
        before, model = engine.policy, models[(later - 1) % 2]
        assert before is not None
        update = publish(models[later % 2], folder / "later.safetensors", later)
        across = [c for c in await cut_at(engine, timeout_s, update) if len(c.spans) == 2]
        for each in across:
            check_switch(each, before, update.policy, model)
        if across:
            return
    raise AssertionError("no turn was cut that two policies wrote")


async def check_without_update(
    engine: VllmEngine, model: PreTrainedModel, policy: PolicyId
) -> None:
    """Check logprobs and spans of what one policy samples, and that a seed repeats it."""
    for temperature in (1.0, 0.7):
        sampled = await engine.generate(PROMPT, Sampling(temperature, seed=3), 48)
        whole = np.concatenate([PROMPT, sampled.token_ids])
        assert difference(reference_logprobs(model, whole, temperature), sampled) < TOLERANCE
        assert [(s.policy, s.length) for s in sampled.spans] == [(policy, len(sampled.token_ids))]
    again = await engine.generate(PROMPT, Sampling(0.7, seed=3), 48)
    assert again.token_ids.tolist() == sampled.token_ids.tolist()


async def check_burn_in(
    engine: VllmEngine, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer to the last position: what time leaves of it, or all of it; nothing of it comes
    from a cache, and nothing is driven out."""
    cached: list[int | None] = []

    async def run_and_note(*given: Any, **named: Any) -> Any:
        answer = await run_request(*given, **named)
        cached.append(answer[0].num_cached_tokens)
        return answer

    monkeypatch.setattr(vllm, "run_request", run_and_note)
    prompt = np.tile(PROMPT, 15)
    await engine.generate(PROMPT, Sampling(1.0, seed=5), 2)
    assert (await engine.burn_in(prompt, 64, 0.01)).timed_out
    whole = await engine.burn_in(prompt, 64, 60.0)
    assert len(whole.token_ids) == 1024 - len(prompt)
    reference = reference_logprobs(model, np.concatenate([prompt, whole.token_ids]))
    assert np.abs(whole.logprobs - reference[len(prompt) - 1 :]).max() < TOLERANCE
    await engine.generate(PROMPT, Sampling(1.0, seed=5), 2)
    assert cached[1:3] == [0, 0]
    assert cached[3], "the burn-in has driven a turn's prefix out of the cache"
    monkeypatch.undo()
    (peak,) = await engine.measure_memory()
    assert 2**27 < peak.host < 2**34
    assert (peak.device, peak.device_total) == (0, 0)


@dataclass(frozen=True, slots=True)
class TinyEngine:
    """A live engine, and the model that it began with."""

    engine: VllmEngine
    model: PreTrainedModel


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tiny(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[TinyEngine]:
    folder = tmp_path_factory.mktemp("engine") / "model"
    model = make_sparse_model(folder)
    engine = await VllmEngine.start_engine(tiny_config(), tiny_served(folder))
    try:
        yield TinyEngine(engine, model)
    finally:
        await engine.close()


async def test_logprobs_follow_the_weights_through_updates(
    tiny: TinyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = tiny.engine, tiny.model
    first = publish(model, tmp_path / "v1.safetensors", 1)
    await engine.load_weights(first, Path(first.location))
    await check_without_update(engine, model, first.policy)
    await check_burn_in(engine, model, monkeypatch)
    await check_thinking_budget(engine, model, TOLERANCE)
    await check_attempt_that_time_cuts(engine, model, TOLERANCE)

    other = perturbed(model, 1)
    second = publish(other, tmp_path / "v2.safetensors", 2)
    running = [
        asyncio.create_task(engine.generate(PROMPT, Sampling(1.0, seed=seed), 500))
        for seed in range(10, 22)
    ]
    await asyncio.sleep(0.3)
    await engine.load_weights(second, Path(second.location))

    canary = await engine.compute_logprobs(second.canary_token_ids)
    expected = reference_logprobs(other, second.canary_token_ids)
    assert np.abs(canary - expected).max() < TOLERANCE
    fresh = await engine.generate(PROMPT, Sampling(1.0, seed=5), 48)
    whole = np.concatenate([PROMPT, fresh.token_ids])
    assert difference(reference_logprobs(other, whole), fresh) < TOLERANCE, "stale cache"

    finished = await asyncio.gather(*running)
    across = [each for each in finished if len(each.spans) == 2]
    assert across, "no request was in flight while the weights changed"
    for completion in across:
        check_switch(completion, first.policy, second.policy, model)

    await check_what_time_cuts(engine, [other, model], tmp_path, version=2)
    fresh = await engine.generate(PROMPT, Sampling(1.0, seed=5), 48)
    assert [span.policy for span in fresh.spans] == [engine.policy]


async def test_weights_that_are_sent_are_served_whole_or_not_at_all(
    tiny: TinyEngine, tmp_path: Path, rank_forge: ProcessForge
) -> None:
    served = Served(tiny.engine, tiny.model, tmp_path, version=50)
    await check_received(served, tmp_path, 2, ("gloo", "ipc"))
    # Not before the first piece is there: an engine that has not read the sender's answer has not
    # begun.
    await check_torn_transfer(served, tmp_path, "kill-3", forge=rank_forge)
    await check_received(served, tmp_path, 1, ("ipc",), forge=rank_forge)


async def test_an_update_with_a_hole_ends_the_engine(tiny: TinyEngine, tmp_path: Path) -> None:
    """Modules without new weights would keep the old ones."""
    path = tmp_path / "hole.safetensors"
    torn = publish(tiny.model, path, 100, without="model.layers.1.mlp.gate.weight")
    with pytest.raises(EngineDead, match=r"no weights have come for model\.layers\.1\.mlp\.gate"):
        await tiny.engine.load_weights(torn, path)
    with pytest.raises(EngineDead):
        await tiny.engine.generate(PROMPT, Sampling(1.0, seed=5), 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("without", "served_as"),
    [
        ("model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.qkv_proj"),
        ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.gate_up_proj"),
    ],
)
async def test_an_update_without_a_part_of_a_merged_weight_ends_the_engine(
    engine_folder: Path, tmp_path: Path, without: str, served_as: str
) -> None:
    path = tmp_path / "hole.safetensors"
    engine = await VllmEngine.start_engine(tiny_config(), tiny_served(engine_folder))
    try:
        torn = publish(load_model(engine_folder), path, 1, without=f"{without}.weight")
        with pytest.raises(EngineDead, match=rf"no weights have come for {served_as}\.weight"):
            await engine.load_weights(torn, path)
    finally:
        await engine.close()


@pytest.mark.slow
async def test_what_begins_while_weights_change_is_of_one_policy_to_its_first_switch(
    engine_folder: Path, tmp_path: Path
) -> None:
    models: list[PreTrainedModel] = [load_model(engine_folder)]
    models.append(perturbed(models[0], 1))
    engine = await VllmEngine.start_engine(tiny_config(), tiny_served(engine_folder))
    finished: list[Completion] = []

    async def keep_requesting(seed: int) -> None:
        while True:
            finished.append(await engine.generate(PROMPT, Sampling(1.0, seed), 4 + seed % 5))

    async def keep_loading() -> None:
        for version in range(2, 14):
            await asyncio.sleep(0.15)
            publication = publish(models[version % 2], tmp_path / "new.safetensors", version)
            await engine.load_weights(publication, Path(publication.location))

    try:
        first = publish(models[1], tmp_path / "first.safetensors", 1)
        await engine.load_weights(first, Path(first.location))
        # More than run at once, so that some wait while the weights change.
        requests = [asyncio.create_task(keep_requesting(seed)) for seed in range(24)]
        await keep_loading()
        await asyncio.sleep(0.3)
        for task in requests:
            task.cancel()
        ends = await asyncio.gather(*requests, return_exceptions=True)
        assert {type(end) for end in ends} == {asyncio.CancelledError}, "a request failed"
    finally:
        await engine.close()
    policies = {each.spans[0].policy for each in finished}
    assert {policy.version for policy in policies if policy} == set(range(1, 14))
    off = [each for each in finished if first_span_error(each, models) > TOLERANCE]
    assert not off, f"{len(off)} of {len(finished)}: {[first_span_error(x, models) for x in off]}"
