import re
from typing import Any

import numpy as np
import pytest

from flotilla.tinker.v1 import tinker_wire_pb2 as pb
from flotilla_tinker.types import SampledAnswer, SampleResult
from flotilla_tinker.wire.samples import (
    POLICY_HEADER,
    read_policy_spans,
    read_sample,
    read_sample_order,
    write_sample_result,
)
from flotilla_tinker.wire.wire_error import WireError
from tests.tinker.wire.examples import make_sample_body


def test_a_sample_is_read_with_the_sdks_defaults() -> None:
    sampler_id, seq_id, order = read_sample_order(make_sample_body(sampling_params={}))

    assert (sampler_id, seq_id) == ("s1:sample:0", 0)
    assert order.prompt_ids.tolist() == [1, 2, 3]
    assert order.prompt_ids.dtype == np.int32
    assert (order.num_samples, order.max_tokens) == (1, 4)
    assert (order.temperature, order.top_p, order.top_k) == (1.0, 1.0, -1)
    assert (order.seed, order.stop_strings, order.stop_ids) == (None, (), ())
    assert not order.prompt_logprobs


def test_a_copied_handle_numbers_its_samples_by_quintillions() -> None:
    _, seq_id, _ = read_sample_order(make_sample_body(seq_id=10**18))

    assert seq_id == 10**18


@pytest.mark.parametrize(
    ("stop", "strings", "ids"),
    [("a", ["a"], []), (["a", "b"], ["a", "b"], []), ([5, 6], [], [5, 6])],
)
def test_stops_are_texts_or_tokens(stop: Any, strings: list[str], ids: list[int]) -> None:
    _, order = read_sample(make_sample_body(sampling_params={"stop": stop}))

    assert (order.stop_strings, order.stop_ids) == (strings, ids)


def test_a_seed_beyond_the_engines_is_folded() -> None:
    _, order = read_sample(make_sample_body(sampling_params={"seed": 2**64 - 1}))

    assert order.seed is not None
    assert 0 <= order.seed < 2**63


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling_session_id": None}, "sampling_session_id and seq_id are missing"),
        ({"record_stability_info": True}, "loss_fn=importance_sampling"),
        ({"topk_sample_logprobs": 2}, "topk_sample_logprobs is not offered"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k is not offered"),
        ({"target_prompt_logprobs": {"data": [1]}}, "target_prompt_logprobs is not offered"),
        ({"prompt": {"chunks": []}}, "prompt has no tokens"),
        ({"prompt": {"chunks": [{"type": "image", "data": "x"}]}}, "prompt.chunks[0] is 'image'"),
        ({"prompt": {"chunks": [{"tokens": [-1]}]}}, "$.prompt.chunks[0].tokens[0]"),
        ({"num_samples": 0}, "$.num_samples"),
        ({"seq_id": "1"}, "$.seq_id"),
        ({"seq_id": 2**63}, "the body is not this request"),
        ({"sampling_params": {"stop": []}}, "an empty one is not offered"),
        ({"sampling_params": {"stop": ["a", 1]}}, "either texts or token ids"),
        ({"sampling_params": {"stop": [-1]}}, "no token id"),
        ({"sampling_params": {"top_k": 0}}, "top_k is 0; -1 keeps all"),
        ({"sampling_params": {"top_p": 0}}, "$.sampling_params.top_p"),
        ({"sampling_params": {"max_tokens": 0}}, "$.sampling_params.max_tokens"),
        ({"prompt_logprobs_last_n": 1}, "send 1 to 2"),
        ({"prompt_logprobs_last_n": 3, "prompt_logprobs": True}, "send 1 to 2"),
        ({"min_p": 0.5}, "unknown field `min_p`"),
    ],
)
def test_a_fault_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(WireError, match=re.escape(message)):
        read_sample(make_sample_body(**fields))


def test_fields_of_a_newer_client_that_ask_for_nothing_are_skipped() -> None:
    _, order = read_sample(make_sample_body(beam_width=0, guide="", tools=[]))

    assert order.num_samples == 1


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"a":' * 50 + b"1", b"\xff", b"[" * 10_000])
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(WireError, match="the body is not this request"):
        read_sample(body)


def _make_answer(*spans: tuple[str, int], stopped: bool = True) -> SampledAnswer:
    values = np.arange(sum(count for _, count in spans))
    return SampledAnswer(values.astype(np.int32), -values.astype(np.float32), stopped, spans)


def test_a_result_has_tokens_logprobs_and_why_each_answer_ended() -> None:
    _, order = read_sample(make_sample_body(num_samples=2))
    answers = [_make_answer(("a", 2)), _make_answer(("a", 1), ("b", 2), stopped=False)]

    result = write_sample_result(SampleResult(answers, cache_hit_tokens=2), order)

    assert result.content_type == "application/x-protobuf"
    message = pb.SampleResponse.FromString(result.body)
    first, second = message.sequences
    assert (first.stop_reason, second.stop_reason) == (0, 1)
    assert np.frombuffer(second.tokens, "<i4").tolist() == [0, 1, 2]
    assert np.frombuffer(second.logprobs, "<f4").tolist() == [0.0, -1.0, -2.0]
    assert message.prompt_cache_hit_tokens == 2
    assert not message.HasField("prompt_logprobs")
    assert not message.HasField("topk_prompt_logprobs")


def test_a_result_names_the_weights_of_each_token() -> None:
    _, order = read_sample(make_sample_body(num_samples=2))
    answers = [_make_answer(("a", 2)), _make_answer(("a", 1), ("b", 2))]

    result = write_sample_result(SampleResult(answers), order)

    assert result.headers == {POLICY_HEADER: "a=2;a=1,b=2"}
    assert read_policy_spans(result) == [
        [{"policy": "a", "tokens": 2}],
        [{"policy": "a", "tokens": 1}, {"policy": "b", "tokens": 2}],
    ]


def test_a_header_is_short_and_holds_no_separator_of_a_label() -> None:
    _, order = read_sample(make_sample_body())
    odd = _make_answer(("a=1,é;\n", 1))
    many = _make_answer(*((f"weights-{each}", 1) for each in range(2000)))

    assert write_sample_result(SampleResult([odd]), order).headers == {
        POLICY_HEADER: "a%3D1%2C%C3%A9%3B%0A=1"
    }
    long = write_sample_result(SampleResult([many]), order)
    assert long.headers == {}
    assert len(read_policy_spans(long)[0]) == 2000


def test_prompt_logprobs_are_those_of_the_tokens_asked_for() -> None:
    _, order = read_sample(make_sample_body(prompt_logprobs=True, prompt_logprobs_last_n=1))
    ids = np.array([[-1, -1], [4, 5], [6, -1]], np.int32)
    top = np.array([[np.nan, np.nan], [-1, -2], [-3, np.nan]], np.float32)
    given = SampleResult([], np.array([np.nan, -1, -2], np.float32), ids, top)

    message = pb.SampleResponse.FromString(write_sample_result(given, order).body)

    logprobs = np.frombuffer(message.prompt_logprobs, "<f4")
    assert np.isnan(logprobs).tolist() == [True, True, False]
    assert logprobs[2] == -2
    shown = message.topk_prompt_logprobs
    assert (shown.k, shown.length) == (2, 3)
    assert np.frombuffer(shown.token_ids, "<i4").tolist() == [0, 0, 0, 0, 6, 0]
    assert np.frombuffer(shown.logprobs, "<f4").tolist() == [-99999.0] * 4 + [-3.0, -99999.0]
