"""Hypotheses about an engine's disagreement: the trainer scores again with one change."""

import copy
import math
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.initial_weights import open_initial_weights
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.score_comparison import (
    PolicyTokens,
    predicting_states,
    score_states,
    swapped_weights,
)
from flotilla_learner.rank.sharding import gather_tensor
from flotilla_learner.rank.text_part import find_tower
from flotilla_learner.rank.weight_slots import WeightSlots
from flotilla_learner.rank.weight_streaming import streamed_weights
from flotilla_learner.types import Hypothesis, Setting, TrainBatch, TrainSequence

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Values in published models; by default a run uses its model's own.
_THETAS = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0, 5_000_000.0, 10_000_000.0)
_TEMPERATURES = (0.05, 20.0)
_SEARCH_STEPS = 24
_GOLDEN = (math.sqrt(5) - 1) / 2
_LAYER = re.compile(r"(.*\.layers\.\d+)\.")


@dataclass(frozen=True, slots=True)
class SuspectModel:
    """A model that disagrees with an engine, and its sources."""

    policy: Policy
    slots: WeightSlots
    config: PolicyConfig
    rank: RankConfig
    # Version of the weights in the model.
    version: int


class _HypothesisTrials:
    """Trials of one change after another on the sequences that the newest weights wrote."""

    def __init__(self, suspect: SuspectModel, batch: TrainBatch) -> None:
        self._suspect = suspect
        self._policy = suspect.policy
        indices = [i for i, s in enumerate(batch.sequences) if s.staleness == 0]
        self._sequences: list[TrainSequence] = [batch.sequences[i] for i in indices]
        self._tokens = PolicyTokens.from_batch(batch, indices, self._policy.device)
        self._own = self._score_tokens(self._policy, self._hidden_states(self._policy))

    def try_all(self) -> Iterator[Hypothesis]:
        """Try every change that this model allows."""
        yield from self._try_temperatures()
        yield from self._try_rope_settings()
        yield from self._try_weights()
        yield from self._try_dtypes()

    def _try_temperatures(self) -> Iterator[Hypothesis]:
        """Try temperature 1, or the best fit: the engine may report logprobs at it."""
        hidden = self._hidden_states(self._policy)
        # A canary, which is scored at 1, comes before the samples.
        sampled = self._tokens.temperature == self._tokens.temperature[-1]

        def score_at(temperature: float) -> Tensor:
            other = torch.where(sampled, temperature, self._tokens.temperature)
            return self._score_tokens(self._policy, hidden, temperature=other.float())

        fitted = _golden_section_search(
            lambda log_t: self._mean_residual(score_at(math.exp(log_t)))
        )
        for temperature in (1.0, math.exp(fitted)):
            yield self._make_hypothesis("temperature", f"{temperature:.3g}", score_at(temperature))

    def _try_rope_settings(self) -> Iterator[Hypothesis]:
        """Try positions encoded without the run's scaling, or with another base."""
        if self._suspect.config.rope_scaling is not None:
            own = _unscaled_rope(self._suspect.config)
            yield from self._try_rope("without policy.rope_scaling", own)
        parameters = getattr(self._policy.config, "rope_parameters", None) or {}
        base = parameters.get("rope_theta")
        for theta in _THETAS:
            if isinstance(base, int | float) and theta != base:
                yield from self._try_rope(
                    f"rope_theta = {theta:.0f}", {**parameters, "rope_theta": theta}
                )

    def _try_rope(self, value: str, parameters: Mapping[str, Any]) -> Iterator[Hypothesis]:
        with _replaced_rope(self._policy.model, parameters) as changed:
            if changed:
                hidden = self._hidden_states(self._policy)
                yield self._make_hypothesis("rope", value, self._score_tokens(self._policy, hidden))

    def _try_weights(self) -> Iterator[Hypothesis]:
        """Try weights that were published before, or never: the head alone, or all of them."""
        policy, hidden = self._policy, self._hidden_states(self._policy)
        embedding: Any = policy.model.get_input_embeddings()
        output: Any = policy.model.get_output_embeddings()
        if embedding.weight is not output.weight:
            scores = self._score_tokens(policy, hidden, head=gather_tensor(embedding.weight))
            yield self._make_hypothesis("head", "the input embedding", scores)
        for version in self._suspect.slots.versions:
            if version != self._suspect.version:
                older = dict(self._suspect.slots.iter_tensors(version))
                yield from self._try_stale_weights(older, hidden, f"version {version}")
        if self._suspect.version > 0:
            first = open_initial_weights(self._suspect.config, list(policy.named_parameters()))
            yield from self._try_stale_weights(
                first, hidden, "policy.model, which the run began with"
            )

    def _try_stale_weights(
        self, older: Mapping[str, Tensor], hidden: Tensor, owner: str
    ) -> Iterator[Hypothesis]:
        """Try an update that did not reach the head, one layer, or anything."""
        with swapped_weights(self._policy, older):
            head = self._policy.head.data
            whole = self._score_tokens(self._policy, self._hidden_states(self._policy))
        yield self._make_hypothesis(
            "head", f"that of {owner}", self._score_tokens(self._policy, hidden, head=head)
        )
        yield self._make_hypothesis("weights", f"those of {owner}", whole)
        for layer, names in _group_by_layer(older).items():
            with swapped_weights(self._policy, {name: older[name] for name in names}):
                scores = self._score_tokens(self._policy, self._hidden_states(self._policy))
            yield self._make_hypothesis("weights", f"new but for {layer}, that of {owner}", scores)

    def _try_dtypes(self) -> Iterator[Hypothesis]:
        """Try the whole model in another dtype, including residual stream, norms and logits.

        Skipped for a split model, whose parameters arrive in one dtype."""
        if self._policy.is_split:
            return
        for name, dtype in _DTYPES.items():
            if dtype == self._policy.compute_dtype:
                continue

            def cast(_: str, own: Tensor, dtype: torch.dtype = dtype) -> Tensor:
                return own.to(dtype) if own.is_floating_point() else own

            with streamed_weights(self._policy, cast):
                # No autocast: everything is computed in this dtype.
                policy = replace(self._policy, compute_dtype=torch.float32)
                hidden = self._hidden_states(policy).to(dtype)
                scores = self._score_tokens(policy, hidden)
            yield self._make_hypothesis("dtype", name, scores)

    def _hidden_states(self, policy: Policy) -> Tensor:
        return predicting_states(policy, self._sequences, self._suspect.rank.pack_tokens)

    def _score_tokens(
        self,
        policy: Policy,
        hidden: Tensor,
        *,
        head: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> Tensor:
        tokens, chunk = self._tokens, self._suspect.rank.head_chunk
        if temperature is not None:
            tokens = replace(tokens, temperature=temperature)
        used = policy.head if head is None else head
        return score_states(policy, hidden, tokens, used, chunk).double()

    def _mean_residual(self, scores: Tensor) -> float:
        return float((scores - self._tokens.behaviour).abs().mean())

    def _make_hypothesis(self, setting: Setting, value: str, scores: Tensor) -> Hypothesis:
        effect = float((scores - self._own).abs().mean())
        return Hypothesis(setting, value, self._mean_residual(scores), effect)


def evaluate_hypotheses(suspect: SuspectModel, batch: TrainBatch) -> tuple[Hypothesis, ...]:
    """Return every hypothesis about the sequences of the newest weights, if there are any."""
    if not any(s.staleness == 0 and s.policy_mask[1:].any() for s in batch.sequences):
        return ()
    return tuple(_HypothesisTrials(suspect, batch).try_all())


def _group_by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """Group parameters by their decoder layer; others form groups of one."""
    found: dict[str, list[str]] = {}
    for name in names:
        layer = _LAYER.match(name)
        found.setdefault(layer.group(1) if layer else name, []).append(name)
    return found


def _golden_section_search(cost: Any) -> float:
    """Return the log temperature of least cost, by golden-section search."""
    low, high = (math.log(bound) for bound in _TEMPERATURES)
    for _ in range(_SEARCH_STEPS):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        low, high = (low, right) if cost(left) < cost(right) else (left, high)
    return (low + high) / 2


def _unscaled_rope(config: PolicyConfig) -> dict[str, Any]:
    """Return the rope parameters of the model's own folder."""
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if config.revision is not None:
        options["revision"] = config.revision
    settings = AutoConfig.from_pretrained(config.model, **options).get_text_config()
    settings.standardize_rope_params()
    return dict(settings.rope_parameters)


@contextmanager
def _replaced_rope(model: nn.Module, parameters: Mapping[str, Any]) -> Generator[bool]:
    """Encode positions with other parameters while the block runs.

    Yields False if the model has no such module that can be rebuilt."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    tower = find_tower(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            own: Any = child
            if hasattr(own, "inv_freq") and hasattr(own, "config") and parent is not tower:
                settings = copy.deepcopy(own.config)
                settings.rope_parameters = dict(parameters)
                made = type(own)(settings).to(own.inv_freq.device)
                setattr(parent, name, made)
                replaced.append((parent, name, child))
    try:
        yield bool(replaced)
    finally:
        for parent, name, child in replaced:
            setattr(parent, name, child)
