"""Checks of an order against the engine's limits, before any of it is computed."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

import grpc

from flotilla_rollout.sampling.refusals import bad_request, refuse
from flotilla_rollout.sampling.types import SamplingOrder

MOST_ANSWERS = 1024
MOST_STOPS = 64
# vLLM would raise a lower one above 0 to it.
LOWEST_TEMPERATURE = 0.01
HIGHEST_TEMPERATURE = 100.0
# What one message may hold, and the bytes of a token id with its logprob.
_MESSAGE_BYTES = 2**20
_PAIR_BYTES = 8


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine can answer."""

    max_model_len: int
    vocabulary: int
    # Likeliest tokens of a position that the engine names.
    most_topk: int


def check_order(order: SamplingOrder, limits: EngineLimits) -> None:
    """Refuse an order that the engine cannot answer. Raises ServiceError, which names the field."""
    if problem := next(_find_problems(order, limits), ""):
        raise bad_request(problem)
    length, answer = len(order.prompt_ids), max(order.max_tokens, 1)
    if length + answer > limits.max_model_len:
        raise refuse(
            grpc.StatusCode.INVALID_ARGUMENT,
            "TOO_LONG",
            f"prompt_ids has {length} tokens, and {answer} more exceed the window of"
            f" {limits.max_model_len} (policy.max_model_len)",
        )


def _find_problems(order: SamplingOrder, limits: EngineLimits) -> Iterator[str]:
    yield from _find_prompt_problems(order, limits)
    yield from _find_sampling_problems(order)
    yield from _find_stop_problems(order, limits)


def _find_prompt_problems(order: SamplingOrder, limits: EngineLimits) -> Iterator[str]:
    prompt, topk = order.prompt_ids, order.topk
    if not len(prompt):
        yield "prompt_ids: there are none"
        return
    if not 0 <= prompt.min() <= prompt.max() < limits.vocabulary:
        yield (
            f"prompt_ids: {prompt.min()} to {prompt.max()}; the vocabulary is 0 to"
            f" {limits.vocabulary - 1}"
        )
    if not 0 <= topk <= limits.most_topk:
        yield (
            f"topk_prompt_logprobs: {topk}; the engine names 0 to {limits.most_topk}"
            " (rollout.engine.options.max_logprobs)"
        )
    if (size := len(prompt) * topk * _PAIR_BYTES) > _MESSAGE_BYTES:
        yield (
            f"topk_prompt_logprobs: {topk} for {len(prompt)} tokens are {size} bytes, and a"
            f" message holds {_MESSAGE_BYTES}: ask for fewer"
        )


def _find_sampling_problems(order: SamplingOrder) -> Iterator[str]:
    reports = order.prompt_logprobs or order.topk
    if not (0 if reports else 1) <= order.num_samples <= MOST_ANSWERS:
        yield (
            f"num_samples: {order.num_samples}; 1 to {MOST_ANSWERS}, or 0 with logprobs of the"
            " prompt"
        )
    for name in ("max_tokens", "first_answer"):
        if getattr(order, name) < 0:
            yield f"{name}: {getattr(order, name)}; at least 0"
    warm = LOWEST_TEMPERATURE <= order.temperature <= HIGHEST_TEMPERATURE
    if not isfinite(order.temperature) or not (order.temperature == 0 or warm):
        yield (
            f"temperature: {order.temperature:g}; 0, or {LOWEST_TEMPERATURE:g} to"
            f" {HIGHEST_TEMPERATURE:g}"
        )
    if not 0 < order.top_p <= 1:
        yield f"top_p: {order.top_p:g}; above 0, at most 1"
    if order.top_k != -1 and order.top_k < 1:
        yield f"top_k: {order.top_k}; at least 1, or -1 to keep all"


def _find_stop_problems(order: SamplingOrder, limits: EngineLimits) -> Iterator[str]:
    if len(order.stop_strings) + len(order.stop_ids) > MOST_STOPS:
        yield f"stop_strings and stop_ids: more than {MOST_STOPS}"
    if not all(order.stop_strings):
        yield "stop_strings: one is empty"
    if outside := [each for each in order.stop_ids if not 0 <= each < limits.vocabulary]:
        yield f"stop_ids: {outside[0]}; the vocabulary is 0 to {limits.vocabulary - 1}"
