"""vLLM's parameters of samplers' requests, and what its answers mean."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flotilla_rollout.adapters.vllm_sampling import SEED_STRIDE, make_params
from flotilla_rollout.sampling.types import PromptReport, SamplingOrder

if TYPE_CHECKING:
    from vllm import SamplingParams


def answer_params(
    order: SamplingOrder, index: int, window: int, own_ends: Sequence[int]
) -> "SamplingParams":
    """Return the parameters of the `index`th answer, in a window of so many tokens.

    `own_ends` stop it if the order names no stops."""
    given = bool(order.stop_strings or order.stop_ids)
    greedy = order.temperature == 0
    seed = None if order.seed is None or greedy else (order.seed + index * SEED_STRIDE) % 2**63
    return make_params(
        temperature=order.temperature,
        top_p=order.top_p,
        top_k=order.top_k,
        seed=seed,
        max_tokens=order.max_tokens or window - len(order.prompt_ids),
        logprobs=0,
        stop=list(order.stop_strings),
        stop_token_ids=list(order.stop_ids if given else own_ends),
        ignore_eos=given,
        # Stops may be special tokens, as ends of turns are.
        detokenize=bool(order.stop_strings),
        skip_special_tokens=False,
        include_stop_str_in_output=True,
    )


def report_params(order: SamplingOrder) -> "SamplingParams":
    return make_params(max_tokens=1, prompt_logprobs=order.topk)


def read_report(flat: Any, topk: int) -> PromptReport:
    """Return the report in vLLM's flat logprobs: at each position the prompt's own token, and then
    the likeliest ones in order."""
    length, width = len(flat.start_indices), topk + 1
    ids: NDArray[np.int32] = np.full((length, width), -1, np.int32)
    logprobs: NDArray[np.float32] = np.full((length, width), np.nan, np.float32)
    for position, start, end in zip(
        range(length), flat.start_indices, flat.end_indices, strict=True
    ):
        ids[position, : end - start] = flat.token_ids[start:end]
        logprobs[position, : end - start] = flat.logprobs[start:end]
    # Rounding may raise one above 0.
    np.minimum(logprobs, np.float32(0.0), out=logprobs)
    return PromptReport(logprobs[:, 0], ids[:, 1:], logprobs[:, 1:])
