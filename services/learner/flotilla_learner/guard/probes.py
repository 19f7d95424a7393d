"""Probes that engines answer at a run's start, and their answers as sequences to score."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flotilla_common.domain.policy import PolicyId
from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.rank.canary import without_tokens
from flotilla_learner.types import Publication, TrainBatch, TrainSequence

_GOLDEN = 0.6180339887498949
_TOKENS = 32
_SHORT_PROMPT = 32
_SHORT_SEEDS = (1, 2, 3, 4)
_LONG_SEEDS = (5, 6)


@dataclass(frozen=True, slots=True)
class Probe:
    """A continuation that an engine samples before it gets work."""

    prompt_token_ids: NDArray[np.int32]
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Tokens that an engine sampled after the prompt, and the logprobs that it reports."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


def start_probes(
    policy: PolicyConfig, vocab_size: int, temperature: float, banned: Sequence[int] = ()
) -> tuple[Probe, ...]:
    """Make short continuations at the training temperature and, if the run stretches the
    model's context, some that begin just where the model's own context ends.

    The prompts depend only on the vocabulary's size, and have no id that is never sampled."""
    longest = policy.max_model_len - _TOKENS
    lengths = [(min(_SHORT_PROMPT, longest), seed) for seed in _SHORT_SEEDS]
    original = (policy.rope_scaling or {}).get("original_max_position_embeddings")
    if original is not None and int(original) <= longest:
        lengths += [(int(original), seed) for seed in _LONG_SEEDS]
    return tuple(
        Probe(
            without_tokens(_make_prompt(length, vocab_size, seed), banned),
            *(_TOKENS, temperature, seed),
        )
        for length, seed in lengths
        if length > 0
    )


class ProbeError(ValueError):
    """Results that do not match the probes."""


def check_results(probes: Sequence[Probe], results: Sequence[ProbeResult], vocab_size: int) -> None:
    """Check that results can be scored; an empty list is valid. Raises ProbeError."""
    if not results:
        return
    if len(results) != len(probes):
        raise ProbeError(f"{len(results)} answers to {len(probes)} probes")
    for probe, result in zip(probes, results, strict=True):
        ids, logprobs = result.token_ids, result.logprobs
        counted = 1 <= len(ids) <= probe.max_tokens and len(ids) == len(logprobs)
        known = counted and ids.min() >= 0 and ids.max() < vocab_size
        if not known or not np.isfinite(logprobs).all():
            raise ProbeError(
                f"an answer must be 1 to {probe.max_tokens} token ids below {vocab_size}, with a"
                " finite logprob for each"
            )


def probe_batch(
    version: int, probes: Sequence[Probe], results: Sequence[ProbeResult]
) -> TrainBatch:
    """Build sequences that `version` wrote from the answers.

    Results and probes are in the same order."""
    pairs = zip(probes, results, strict=True)
    return TrainBatch(version + 1, tuple(_probe_sequence(i, *pair) for i, pair in enumerate(pairs)))


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Report of an engine on a policy that it has loaded."""

    worker_id: str
    policy: PolicyId
    canary: NDArray[np.float32]
    results: tuple[ProbeResult, ...]


def build_evidence(
    answer: EngineReport, publication: Publication | None, probes: Sequence[Probe]
) -> tuple[str, TrainBatch]:
    """Name the content of a report, and return it as sequences that its version wrote.

    The canary comes first."""
    version = answer.policy.version
    rows: tuple[TrainSequence, ...] = ()
    if publication is not None and len(answer.canary) == len(publication.canary_logprobs):
        rows = (_canary_sequence(publication, answer.canary),)
    shown = publication.canary_pictures if publication is not None and rows else ()
    pictures = {each.picture.sha256: each.picture.data for each in shown}
    if not answer.results or len(answer.results) != len(probes):
        return "canary", TrainBatch(version + 1, rows, pictures=pictures)
    sampled = probe_batch(version, probes, answer.results).sequences
    return "canary and probes", TrainBatch(version + 1, rows + sampled, pictures=pictures)


def _canary_sequence(publication: Publication, logprobs: NDArray[np.float32]) -> TrainSequence:
    """Return a canary as a sequence of which the engine scored all but the first token."""
    built = _build_sequence("canary", 0, publication.canary_token_ids, logprobs, temperature=1.0)
    places = tuple(shown.place for shown in publication.canary_pictures)
    return replace(built, pictures=places, canary=True)


def _probe_sequence(index: int, probe: Probe, result: ProbeResult) -> TrainSequence:
    ids = np.concatenate([probe.prompt_token_ids, result.token_ids]).astype(np.int32)
    return _build_sequence("probe", index, ids, result.logprobs, temperature=probe.temperature)


def _build_sequence(
    group_id: str,
    index: int,
    token_ids: NDArray[np.int32],
    logprobs: NDArray[np.float32],
    *,
    temperature: float,
) -> TrainSequence:
    """Build a sequence whose last `len(logprobs)` tokens are the policy's."""
    first = len(token_ids) - len(logprobs)
    behaviour = np.zeros(len(token_ids), np.float32)
    behaviour[first:] = logprobs
    return TrainSequence(
        group_id=group_id,
        attempt_index=index,
        reward=0.0,
        token_ids=token_ids,
        policy_mask=np.arange(len(token_ids)) >= first,
        behaviour_logprobs=behaviour,
        temperature=temperature,
        staleness=0,
    )


def _make_prompt(length: int, vocab_size: int, seed: int) -> NDArray[np.int32]:
    """Make token ids spread over the whole vocabulary, different for every seed."""
    spots = (np.arange(1, length + 1, dtype=np.float64) * _GOLDEN + seed / 7) % 1.0
    return (spots * vocab_size).astype(np.int32)
