"""Samplers on a real vLLM: what they answer is what their own weights say, whoever asks meanwhile.

One engine serves all tests of this module."""

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from transformers import AutoTokenizer

from flotilla.rollout.v1 import sampling_service_pb2 as pb
from flotilla_common.aio.concurrency import cancel_tasks
from flotilla_common.rpc.rpc import refusal_reason
from tests.rollout.sampling.served_samplers import (
    ATTENTION,
    LIMITS,
    MLP,
    PROMPT,
    TOLERANCE,
    WINDOW,
    Answering,
    ServedSamplers,
    adapter,
    all_logprobs,
    answer_error,
    continued_error,
    logprobs_of,
    make_adapter,
    order,
    serving_samplers,
    spans_of,
    tokens_of,
    whole_model,
)
from tests.rollout.sampling.tinker_on_vllm import check_tinker_engine
from tests.support.tiny_model import load_model, perturbed
from tests.support.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.engine,
    pytest.mark.timeout(560),
    # What vLLM and torch warn about at import is theirs to mend.
    pytest.mark.filterwarnings("default"),
]
BASE = pb.SamplerWeights(label="base", base=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(engine_folder: Path) -> AsyncGenerator[ServedSamplers]:
    async with serving_samplers(engine_folder) as served:
        yield served


async def open_one(served: ServedSamplers, sampler_id: str, weights: pb.SamplerWeights) -> None:
    request = pb.OpenSamplerRequest(sampler_id=sampler_id, weights=weights)
    await served.stub.OpenSampler(request)


async def close(served: ServedSamplers, *sampler_ids: str) -> None:
    for each in sampler_ids:
        await served.stub.CloseSampler(pb.CloseSamplerRequest(sampler_id=each))


def unfinished_in(served: ServedSamplers) -> dict[str, Any]:
    """The requests that the engine has not answered yet."""
    return served.engine._llm.output_processor.request_states  # pyright: ignore[reportPrivateUsage]


async def until_sampled(served: ServedSamplers, tokens: int) -> None:
    """Wait until some request has so many tokens."""
    unfinished = unfinished_in(served)
    await until(
        lambda: any(each.detokenizer.num_output_tokens() > tokens for each in unfinished.values())
    )


async def refusal_of(call: grpc.aio.Call) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call  # pyright: ignore[reportGeneralTypeIssues]
    return f"{refusal_reason(refused.value)}: {refused.value.details()}"


async def test_the_base_and_adapters_answer_concurrently_each_by_its_own_weights(
    served: ServedSamplers, engine_folder: Path, tmp_path: Path
) -> None:
    """Three adapters share the two places of the engine, over one prompt."""
    models: dict[str, Answering] = {"base": load_model(engine_folder)}
    await open_one(served, "base", BASE)
    for seed, (name, rank, targets) in enumerate(
        [("a", 8, ATTENTION + MLP), ("b", 4, MLP), ("c", 1, ATTENTION)]
    ):
        folder = tmp_path / name
        models[name] = make_adapter(engine_folder, folder, seed, rank=rank, targets=targets)
        await open_one(served, name, adapter(name, folder))
        await open_one(served, name, adapter(name, folder))  # Repeatable.
    described = await served.stub.DescribeEngine(pb.DescribeEngineRequest())
    assert list(described.sampler_ids) == ["base", "a", "b", "c"]
    assert (described.max_model_len, described.vocabulary) == (WINDOW, 384)
    assert (described.max_rank, described.max_num_seqs) == (LIMITS.max_rank, 16)
    asked = [(name, temperature) for temperature in (1.0, 0.7) for name in models]
    responses = await asyncio.gather(
        *(
            served.stub.Sample(order(name, num_samples=4, temperature=heat, seed=7))
            for name, heat in asked
        )
    )
    for (name, heat), response in zip(asked, responses, strict=True):
        for answer in response.answers:
            assert spans_of(answer) == [(name, 24)]
            assert answer_error(models[name], answer, heat) < TOLERANCE
    wrong = answer_error(models["base"], responses[1].answers[0])
    assert wrong > 100 * TOLERANCE, "the adapter changes nothing, so that this proves nothing"
    again = await served.stub.Sample(order("b", num_samples=4, temperature=0.7, seed=7))
    assert [tokens_of(x).tolist() for x in again.answers] == [
        tokens_of(x).tolist() for x in responses[6].answers
    ]
    assert len({x.token_ids for x in again.answers}) == 4, "answers share a seed"
    assert again.prompt_cache_hit_tokens == 32
    parts = [order("b", num_samples=2, temperature=0.7, seed=7, first_answer=at) for at in (0, 2)]
    asked_in_parts = [(await served.stub.Sample(part)).answers for part in parts]
    assert [x.token_ids for part in asked_in_parts for x in part] == [
        x.token_ids for x in again.answers
    ]
    await close(served, "base", "a", "b", "c")


async def test_logprobs_of_a_prompt_are_the_models_and_the_likeliest_come_first(
    served: ServedSamplers, engine_folder: Path, tmp_path: Path
) -> None:
    model = make_adapter(engine_folder, tmp_path, 3)
    await open_one(served, "a", adapter("a", tmp_path))
    asked = order("a", num_samples=0, temperature=0.5, prompt_logprobs=True, topk_prompt_logprobs=5)
    response = await served.stub.Sample(asked)
    assert not response.answers
    assert response.prompt_cache_hit_tokens == 0
    table = all_logprobs(model, PROMPT)[:-1]
    own = np.frombuffer(response.prompt_logprobs, "<f4")
    assert np.isnan(own[0])
    assert np.abs(own[1:] - table[np.arange(len(table)), PROMPT[1:]]).max() < TOLERANCE
    ids = np.frombuffer(response.topk_ids, "<i4").reshape(-1, 5)
    logprobs = np.frombuffer(response.topk_logprobs, "<f4").reshape(-1, 5)
    assert (ids[0] == -1).all()
    assert np.isnan(logprobs[0]).all()
    assert (ids[1:] == np.argsort(-table, -1)[:, :5]).all()
    assert np.abs(logprobs[1:] - -np.sort(-table, -1)[:, :5]).max() < TOLERANCE
    await close(served, "a")


async def test_logprobs_are_of_the_distribution_cut_to_the_likeliest_tokens(
    served: ServedSamplers, engine_folder: Path
) -> None:
    await open_one(served, "base", BASE)
    model = load_model(engine_folder)
    answer = (await served.stub.Sample(order("base", top_k=5, temperature=0.8))).answers[0]
    ids = tokens_of(answer)
    table = all_logprobs(model, np.concatenate([PROMPT, ids]), 0.8)[len(PROMPT) - 1 : -1]
    likeliest = -np.sort(-table, -1)[:, :5]
    own = table[np.arange(len(ids)), ids]
    assert (own >= likeliest[:, -1]).all()
    expected = own - np.log(np.exp(likeliest).sum(-1))
    assert np.abs(expected - logprobs_of(answer)).max() < TOLERANCE
    greedy = (await served.stub.Sample(order("base", temperature=0.0))).answers[0]
    ids = tokens_of(greedy)
    table = all_logprobs(model, np.concatenate([PROMPT, ids]))[len(PROMPT) - 1 : -1]
    assert np.array_equal(ids, table.argmax(-1))
    await close(served, "base")


async def test_an_answer_ends_by_a_string_by_an_id_by_its_own_end_or_is_cut(
    served: ServedSamplers, engine_folder: Path
) -> None:
    await open_one(served, "base", BASE)
    tokenizer = AutoTokenizer.from_pretrained(str(engine_folder))
    plain = (await served.stub.Sample(order("base", seed=3, max_tokens=64))).answers[0]
    assert not plain.stopped
    sampled = tokens_of(plain)
    text = tokenizer.decode(sampled.tolist())
    word = text[40:43]
    by_text = order("base", seed=3, max_tokens=64, stop_strings=[word])
    ended = (await served.stub.Sample(by_text)).answers[0]
    shown = tokenizer.decode(tokens_of(ended).tolist())
    assert ended.stopped
    assert word in shown
    assert word not in tokenizer.decode(tokens_of(ended).tolist()[:-1])
    assert np.array_equal(tokens_of(ended), sampled[: len(tokens_of(ended))])
    assert np.array_equal(logprobs_of(ended), logprobs_of(plain)[: len(tokens_of(ended))])
    assert spans_of(ended) == [("base", len(tokens_of(ended)))]
    by_id = order("base", seed=3, max_tokens=64, stop_strings=[], stop_ids=[int(sampled[9])])
    ended = (await served.stub.Sample(by_id)).answers[0]
    assert ended.stopped
    assert tokens_of(ended)[-1] == sampled[9]
    assert len(tokens_of(ended)) <= 10
    # Its own end is tried often enough to come.
    own_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    many = await served.stub.Sample(order("base", num_samples=8, max_tokens=0, stop_strings=[]))
    for answer in many.answers:
        assert answer.stopped == (tokens_of(answer)[-1] == own_end)
        assert answer.stopped or len(PROMPT) + len(tokens_of(answer)) == WINDOW
    assert any(answer.stopped for answer in many.answers)
    special = order("base", seed=3, max_tokens=0, stop_strings=["<|im_end|>"])
    answer = (await served.stub.Sample(special)).answers[0]
    assert answer.stopped == (tokens_of(answer)[-1] == own_end)
    await close(served, "base")


async def test_running_requests_continue_with_replaced_weights_and_tell_which(
    served: ServedSamplers, engine_folder: Path, tmp_path: Path
) -> None:
    """That of another sampler goes on with its own; what comes later finds no stale cache."""
    old = make_adapter(engine_folder, tmp_path / "old", 5)
    new = make_adapter(engine_folder, tmp_path / "new", 6, rank=4)
    await open_one(served, "live", adapter("step-1", tmp_path / "old"))
    await open_one(served, "kept", adapter("kept", tmp_path / "old"))
    running = [
        asyncio.ensure_future(served.stub.Sample(order(name, num_samples=6, max_tokens=700)))
        for name in ("live", "kept")
    ]
    await until_sampled(served, 40)
    replaced = pb.ReplaceWeightsRequest(
        sampler_id="live", weights=adapter("step-2", tmp_path / "new")
    )
    await served.stub.ReplaceWeights(replaced)
    later = (await served.stub.Sample(order("live"))).answers[0]
    assert spans_of(later) == [("step-2", 24)]
    assert answer_error(new, later) < TOLERANCE
    live, kept = await asyncio.gather(*running)
    for answer in kept.answers:
        assert spans_of(answer) == [("kept", 700)]
        assert answer_error(old, answer) < TOLERANCE
    for answer in live.answers:
        (first, switch), (second, rest) = spans_of(answer)
        assert (first, second, switch + rest) == ("step-1", "step-2", 700)
        assert continued_error(old, new, answer, switch) < TOLERANCE
        assert continued_error(old, old, answer, switch) > 100 * TOLERANCE
        before = pb.Answer(
            token_ids=tokens_of(answer)[:switch].tobytes(),
            logprobs=logprobs_of(answer)[:switch].tobytes(),
        )
        assert answer_error(old, before) < TOLERANCE
    await close(served, "live", "kept")


async def test_what_begins_while_weights_change_is_of_one_label_to_its_first_switch(
    served: ServedSamplers, engine_folder: Path, tmp_path: Path
) -> None:
    """Of its label, its logprobs are exact: no prefix in its cache is of others."""
    models = [make_adapter(engine_folder, tmp_path / str(seed), seed) for seed in (0, 1)]
    await open_one(served, "live", adapter("0", tmp_path / "0"))
    finished: list[pb.Answer] = []

    async def keep_asking(tokens: int) -> None:
        while True:
            finished.extend((await served.stub.Sample(order("live", max_tokens=tokens))).answers)

    def has_begun(step: int) -> bool:
        return any(spans_of(answer)[0][0] == str(step) for answer in finished)

    # More than run concurrently, so that some wait while the weights change.
    asking = [asyncio.create_task(keep_asking(4 + each % 5)) for each in range(24)]
    for step in range(1, 13):
        await asyncio.sleep(0.15)
        await until(partial(has_begun, step - 1))
        weights = adapter(str(step), tmp_path / str(step % 2))
        request = pb.ReplaceWeightsRequest(sampler_id="live", weights=weights)
        await served.stub.ReplaceWeights(request)
    await until(partial(has_begun, 12))
    assert not any(task.done() for task in asking), "a request failed"
    await cancel_tasks(asking)
    assert {spans_of(answer)[0][0] for answer in finished} == set(map(str, range(13)))
    for answer in finished:
        label, count = spans_of(answer)[0]
        first = pb.Answer(token_ids=answer.token_ids[: 4 * count])
        first.logprobs = answer.logprobs[: 4 * count]
        assert answer_error(models[int(label) % 2], first) < TOLERANCE
    await close(served, "live")


async def test_whole_models_take_turns_with_the_base_and_its_adapters(
    served: ServedSamplers, engine_folder: Path, tmp_path: Path
) -> None:
    base = load_model(engine_folder)
    models: dict[str, Answering] = {"base": base}
    models["adapter"] = make_adapter(engine_folder, tmp_path / "adapter", 8)
    await open_one(served, "base", BASE)
    await open_one(served, "adapter", adapter("adapter", tmp_path / "adapter"))
    for seed, name in enumerate(("one", "two")):
        models[name] = other = perturbed(base, seed)
        other.save_pretrained(tmp_path / name)
        await open_one(served, name, whole_model(name, tmp_path / name))
    asked = [*models] * 4
    responses = await asyncio.gather(*(served.stub.Sample(order(name)) for name in asked))
    for name, response in zip(asked, responses, strict=True):
        assert spans_of(response.answers[0]) == [(name, 24)]
        assert answer_error(models[name], response.answers[0]) < TOLERANCE, name
    assert answer_error(models["one"], responses[0].answers[0]) > 100 * TOLERANCE

    running = asyncio.ensure_future(served.stub.Sample(order("one", max_tokens=700)))
    await until_sampled(served, 40)
    replaced = pb.ReplaceWeightsRequest(
        sampler_id="one", weights=whole_model("one, later", tmp_path / "two")
    )
    await served.stub.ReplaceWeights(replaced)
    answer = (await running).answers[0]
    (first, switch), (second, _) = spans_of(answer)
    assert (first, second) == ("one", "one, later")
    assert continued_error(models["one"], models["two"], answer, switch) < TOLERANCE
    later = (await served.stub.Sample(order("one"))).answers[0]
    assert answer_error(models["two"], later) < TOLERANCE
    back = (await served.stub.Sample(order("adapter"))).answers[0]
    assert answer_error(models["adapter"], back) < TOLERANCE
    await close(served, "base", "adapter", "one", "two")


async def test_a_cancelled_call_ends_its_requests_and_a_closed_sampler_answers_to_the_end(
    served: ServedSamplers, engine_folder: Path, tmp_path: Path
) -> None:
    model = make_adapter(engine_folder, tmp_path, 9)
    await open_one(served, "a", adapter("a", tmp_path))
    unfinished = unfinished_in(served)
    call = served.stub.Sample(order("a", num_samples=20, max_tokens=900))
    await until(lambda: len(unfinished) == 16)  # Four wait for a place.
    call.cancel()
    await until(lambda: not unfinished)
    running = served.stub.Sample(order("a", max_tokens=300))
    await until(lambda: len(unfinished) == 1)
    await close(served, "a", "a")
    assert "SAMPLER_UNKNOWN" in await refusal_of(served.stub.Sample(order("a")))
    await open_one(served, "a", BASE)
    answer = (await running).answers[0]
    assert spans_of(answer) == [("a", 300)]
    assert answer_error(model, answer) < TOLERANCE
    await close(served, "a")


async def test_what_the_engine_would_not_answer_rightly_is_refused(
    served: ServedSamplers, engine_folder: Path, tmp_path: Path
) -> None:
    async def opening(weights: pb.SamplerWeights, sampler_id: str = "x") -> str:
        request = pb.OpenSamplerRequest(sampler_id=sampler_id, weights=weights)
        return await refusal_of(served.stub.OpenSampler(request))

    make_adapter(engine_folder, tmp_path / "large", 1, rank=16)
    assert "NO_WEIGHTS" in await opening(adapter("large", tmp_path / "large"))
    assert "NO_WEIGHTS" in await opening(adapter("none", tmp_path / "none"))
    make_adapter(engine_folder, tmp_path / "embed", 1, targets=("embed_tokens",))
    assert "no matrix of a linear layer" in await opening(adapter("e", tmp_path / "embed"))
    make_adapter(engine_folder, tmp_path / "good", 1)
    for index in range(LIMITS.max_samplers):
        await open_one(served, f"s{index}", adapter(f"s{index}", tmp_path / "good"))
    assert "TOO_MANY_SAMPLERS" in await opening(adapter("good", tmp_path / "good"))
    assert "SAMPLER_EXISTS" in await opening(BASE, "s0")
    kind = pb.ReplaceWeightsRequest(sampler_id="s0", weights=BASE)
    assert "BAD_REQUEST" in await refusal_of(served.stub.ReplaceWeights(kind))
    bad = pb.ReplaceWeightsRequest(sampler_id="s0", weights=adapter("l", tmp_path / "large"))
    assert "NO_WEIGHTS" in await refusal_of(served.stub.ReplaceWeights(bad))
    long = order("s0", max_tokens=WINDOW - len(PROMPT) + 1)
    assert "TOO_LONG" in await refusal_of(served.stub.Sample(long))
    outside = order("s0", np.array([3, 384], np.int32))
    assert "BAD_REQUEST: prompt_ids" in await refusal_of(served.stub.Sample(outside))
    answer = (await served.stub.Sample(order("s0"))).answers[0]
    assert spans_of(answer) == [("s0", 24)]
    await close(served, *(f"s{index}" for index in range(LIMITS.max_samplers)))


async def test_a_rollout_at_the_front_door_trains_on_the_tokens_that_were_sampled(
    served: ServedSamplers, engine_folder: Path, tmp_path: Path
) -> None:
    await check_tinker_engine(served, engine_folder, tmp_path)
