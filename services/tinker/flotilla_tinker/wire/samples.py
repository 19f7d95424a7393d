"""Requests for samples, and their results."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from flotilla.tinker.v1 import tinker_wire_pb2 as pb
from flotilla_tinker.types import Result, SampledAnswer, SampleOrder, SampleResult
from flotilla_tinker.wire.bodies import PromptBody, SampleBody, SamplingBody
from flotilla_tinker.wire.json_bodies import read_json
from flotilla_tinker.wire.loss_batches import STABLE_REINFORCE
from flotilla_tinker.wire.tensors import write_array
from flotilla_tinker.wire.wire_error import WireError

PROTOBUF = "application/x-protobuf"
# Spans of `policy=tokens`: those of an answer are separated by commas, answers by semicolons.
POLICY_HEADER = "X-Flotilla-Policy-Spans"
_HEADER_BYTES = 4096
# What the SDK reads as an empty cell.
_NO_TOKEN, _NO_LOGPROB = 0, -99999.0
# As seeds beyond an int64 are folded by the SDK's own server.
_SEEDS = 2**63 - 1


def read_sample(body: bytes) -> tuple[str, SampleOrder]:
    """Read a body of asample: the sampler's id, and what to sample. Raises WireError."""
    sampler_id, _, order = read_sample_order(body)
    return sampler_id, order


def read_sample_order(body: bytes) -> tuple[str, int, SampleOrder]:
    """Read a body of asample: the sampler's id, the order's number, what to sample. Raises
    WireError."""
    given = read_json(body, SampleBody)
    if given.sampling_session_id is None or given.seq_id is None:
        raise WireError(
            "sampling_session_id and seq_id are missing: create_sampling_session opens a session"
            " for a base_model or a model_path"
        )
    _check_offered(given)
    prompt, params = _read_prompt(given.prompt), given.sampling_params
    strings, ids = _read_stops(params)
    if params.top_k != -1 and params.top_k < 1:
        raise WireError(f"sampling_params.top_k is {params.top_k}; -1 keeps all tokens")
    order = SampleOrder(
        prompt_ids=prompt,
        num_samples=given.num_samples,
        max_tokens=params.max_tokens or 0,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=None if params.seed is None else params.seed % _SEEDS,
        stop_strings=strings,
        stop_ids=ids,
        prompt_logprobs=bool(given.prompt_logprobs),
        topk_prompt_logprobs=given.topk_prompt_logprobs,
        prompt_logprobs_last_n=_read_last(given, len(prompt)),
    )
    return given.sampling_session_id, given.seq_id, order


def _check_offered(given: SampleBody) -> None:
    """Raise WireError for what this server would have to leave out."""
    if given.record_stability_info:
        raise WireError(f"record_stability_info: {STABLE_REINFORCE}")
    for name in ("topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k"):
        if getattr(given, name):
            raise WireError(f"{name} is not offered: leave it out")


def _read_prompt(prompt: PromptBody) -> NDArray[np.int32]:
    tokens: list[int] = []
    for number, chunk in enumerate(prompt.chunks):
        if chunk.type != "encoded_text":
            raise WireError(
                f"prompt.chunks[{number}] is {chunk.type!r}: this server reads text only"
            )
        tokens += chunk.tokens
    if not tokens:
        raise WireError("prompt has no tokens")
    return np.array(tokens, np.int32)


def _read_stops(params: SamplingBody) -> tuple[Sequence[str], Sequence[int]]:
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    if stop is None:
        return (), ()
    strings = [each for each in stop if isinstance(each, str)]
    ids = [each for each in stop if isinstance(each, int)]
    if not stop or "" in strings:
        raise WireError(
            "sampling_params.stop: an empty one is not offered; without it the model's own end of a"
            " turn stops an answer"
        )
    if strings and ids:
        raise WireError("sampling_params.stop: send either texts or token ids")
    if any(not 0 <= each < 2**31 for each in ids):
        raise WireError("sampling_params.stop has a number that is no token id")
    return strings, ids


def _read_last(given: SampleBody, prompt_tokens: int) -> int | None:
    last = given.prompt_logprobs_last_n
    if last is not None and not (given.prompt_logprobs and 1 <= last < prompt_tokens):
        raise WireError(
            f"prompt_logprobs_last_n is {last}: send 1 to {prompt_tokens - 1}, one below the"
            " prompt's length, together with prompt_logprobs"
        )
    return last


def write_sample_result(result: SampleResult, order: SampleOrder) -> Result:
    """Write the result of an order; its header names the weights of each token, if it is short."""
    message = pb.SampleResponse(
        sequences=[_write_answer(answer) for answer in result.answers],
        prompt_cache_hit_tokens=result.cache_hit_tokens,
    )
    skipped = len(order.prompt_ids) - (order.prompt_logprobs_last_n or len(order.prompt_ids))
    if result.prompt_logprobs is not None:
        logprobs = np.array(result.prompt_logprobs, np.float32)
        logprobs[:skipped] = np.nan
        message.prompt_logprobs = write_array(logprobs, "<f4")
    if result.topk_ids is not None and result.topk_logprobs is not None:
        top = _write_top(result.topk_ids, result.topk_logprobs, skipped)
        message.topk_prompt_logprobs.CopyFrom(top)
    header = write_policy_header(result.answers)
    headers = {POLICY_HEADER: header} if len(header) <= _HEADER_BYTES else {}
    return Result(message.SerializeToString(), PROTOBUF, headers)


def _write_answer(answer: SampledAnswer) -> pb.SampledSequence:
    return pb.SampledSequence(
        stop_reason=pb.STOP_REASON_STOP if answer.stopped else pb.STOP_REASON_LENGTH,
        tokens=write_array(answer.token_ids, "<i4"),
        logprobs=write_array(answer.logprobs, "<f4"),
        policy_spans=[pb.PolicySpan(policy=label, tokens=count) for label, count in answer.spans],
    )


def _write_top(ids: NDArray[np.int32], logprobs: NDArray[np.float32], skipped: int) -> pb.TopTokens:
    empty = ids < 0
    empty[:skipped] = True
    return pb.TopTokens(
        token_ids=write_array(np.where(empty, _NO_TOKEN, ids), "<i4"),
        logprobs=write_array(np.where(empty, _NO_LOGPROB, logprobs), "<f4"),
        k=ids.shape[1],
        length=len(ids),
    )


def write_policy_header(answers: Sequence[SampledAnswer]) -> str:
    """Return the weights of each answer's tokens, such as `m1@3=12,m1@4=5;m1@4=20`."""
    return ";".join(
        ",".join(f"{quote(label, safe='@:/')}={count}" for label, count in answer.spans)
        for answer in answers
    )


def read_policy_spans(result: Result) -> list[list[Mapping[str, Any]]]:
    """Return the weights of each answer's tokens of a sample's result."""
    message = pb.SampleResponse.FromString(result.body)
    return [
        [{"policy": span.policy, "tokens": span.tokens} for span in sequence.policy_spans]
        for sequence in message.sequences
    ]
