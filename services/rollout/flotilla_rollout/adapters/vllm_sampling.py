"""vLLM's parameters of a request: a turn, a score of given tokens, the burn-in's answer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flotilla_rollout.types import Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams

# Odd, so that different lengths give one attempt different seeds.
SEED_STRIDE = 0x9E3779B97F4A7C15


def turn_params(
    sampling: Sampling,
    length: int,
    max_tokens: int,
    stop: Sequence[int],
    *,
    seeded: bool,
    more: Mapping[str, Any],
) -> "SamplingParams":
    """Return the parameters of a turn after `length` tokens, with `more` fields."""
    return make_params(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=derive_seed(sampling, length) if seeded else None,
        max_tokens=max_tokens,
        # Besides the sampled token's: those of what it was sampled from.
        logprobs=sampling.top_k,
        stop_token_ids=list(stop),
        **more,
    )


def score_params() -> "SamplingParams":
    """Return the parameters for scoring the prompt's own tokens."""
    return make_params(max_tokens=1, prompt_logprobs=0)


def burn_in_params(max_tokens: int, *, seeded: bool) -> "SamplingParams":
    """Return the parameters of an answer that is sampled like a turn but ends only at
    `max_tokens`."""
    seed = 0 if seeded else None
    return make_params(
        temperature=1.0, seed=seed, max_tokens=max_tokens, logprobs=0, ignore_eos=True
    )


def make_params(**given: Any) -> "SamplingParams":
    """Return parameters of a request that is answered once, without text unless that is given."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    defaults: dict[str, Any] = {"detokenize": False, "output_kind": RequestOutputKind.FINAL_ONLY}
    return SamplingParams(flat_logprobs=True, **(defaults | given))


def derive_seed(sampling: Sampling, length: int) -> int | None:
    """Derive a seed for every turn of an attempt; None for greedy."""
    if sampling.temperature == 0:
        return None
    return (sampling.seed + length * SEED_STRIDE) % 2**63
