"""What would explain that an engine disagrees: the trainer scores again with one thing changed."""

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

from services.common.spec import PolicyConfig
from services.learner.algo.logprob_head import token_logprobs
from services.learner.config.rank import RankConfig
from services.learner.guard.types import Hypothesis, Setting
from services.learner.rank.model import Policy, load
from services.learner.rank.publish import WeightSlots
from services.learner.rank.score_comparison import PolicyTokens, other_weights, states
from services.learner.types import TrainBatch, TrainSequence

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# What published models use; a run that says nothing gets its model's own.
_THETAS = (10_000.0, 100_000.0, 500_000.0, 1_000_000.0, 5_000_000.0, 10_000_000.0)
_TEMPERATURES = (0.05, 20.0)
_SEARCH_STEPS = 24
_GOLDEN = (math.sqrt(5) - 1) / 2
_LAYER = re.compile(r"(.*\.layers\.\d+)\.")


@dataclass(frozen=True, slots=True)
class Suspect:
    """A model that disagrees with an engine, and what it was made from."""

    policy: Policy
    slots: WeightSlots
    config: PolicyConfig
    rank: RankConfig
    # The version of the weights in the model.
    version: int


class _Trials:
    """Tries one change after another on the sequences that the newest weights wrote."""

    def __init__(self, suspect: Suspect, batch: TrainBatch) -> None:
        self._suspect = suspect
        self._policy = suspect.policy
        indices = [i for i, s in enumerate(batch.sequences) if s.staleness == 0]
        self._sequences: list[TrainSequence] = [batch.sequences[i] for i in indices]
        self._tokens = PolicyTokens.of(batch, indices, self._policy.device)
        self._own = self._scores(self._policy, self._states(self._policy))

    def all(self) -> Iterator[Hypothesis]:
        """Every change that this model allows."""
        yield from self._temperatures()
        yield from self._rope()
        yield from self._weights()
        yield from self._dtypes()

    def _temperatures(self) -> Iterator[Hypothesis]:
        """The engine may report logprobs of temperature 1, or of whichever fits best."""
        hidden = self._states(self._policy)
        # A canary, which is scored at 1, comes before what was sampled.
        sampled = self._tokens.temperature == self._tokens.temperature[-1]

        def scores(temperature: float) -> Tensor:
            other = torch.where(sampled, temperature, self._tokens.temperature)
            return self._scores(self._policy, hidden, temperature=other.float())

        fitted = _minimum(lambda log_t: self._residual(scores(math.exp(log_t))))
        for temperature in (1.0, math.exp(fitted)):
            yield self._hypothesis("temperature", f"{temperature:.3g}", scores(temperature))

    def _rope(self) -> Iterator[Hypothesis]:
        """Positions may be encoded without the run's scaling, or with another base."""
        if self._suspect.config.rope_scaling is not None:
            own = _unscaled(self._suspect.config)
            yield from self._with_rope("without policy.rope_scaling", own)
        parameters = getattr(self._policy.config, "rope_parameters", None) or {}
        base = parameters.get("rope_theta")
        for theta in _THETAS:
            if isinstance(base, int | float) and theta != base:
                yield from self._with_rope(
                    f"rope_theta = {theta:.0f}", {**parameters, "rope_theta": theta}
                )

    def _with_rope(self, value: str, parameters: Mapping[str, Any]) -> Iterator[Hypothesis]:
        with _rope_parameters(self._policy.model, parameters) as changed:
            if changed:
                hidden = self._states(self._policy)
                yield self._hypothesis("rope", value, self._scores(self._policy, hidden))

    def _weights(self) -> Iterator[Hypothesis]:
        """Weights that were published before, or never: the head alone, or all of them."""
        policy, hidden = self._policy, self._states(self._policy)
        embedding: Any = policy.model.get_input_embeddings()
        if embedding.weight is not policy.head:
            scores = self._scores(policy, hidden, head=embedding.weight)
            yield self._hypothesis("head", "the input embedding", scores)
        for version in self._suspect.slots.versions:
            if version != self._suspect.version:
                older = dict(self._suspect.slots.tensors(version))
                yield from self._left_behind(older, hidden, f"version {version}")
        if self._suspect.version > 0:
            first = load(self._suspect.config, self._suspect.rank).named_parameters()
            own = {name: parameter.data for name, parameter in first.items()}
            yield from self._left_behind(own, hidden, "policy.model, which the run began with")

    def _left_behind(
        self, older: Mapping[str, Tensor], hidden: Tensor, owner: str
    ) -> Iterator[Hypothesis]:
        """An update that did not reach the head, one layer, or anything."""
        with other_weights(self._policy, older.items()):
            head = self._policy.head.data
            whole = self._scores(self._policy, self._states(self._policy))
        yield self._hypothesis(
            "head", f"that of {owner}", self._scores(self._policy, hidden, head=head)
        )
        yield self._hypothesis("weights", f"those of {owner}", whole)
        for layer, names in _layers(older).items():
            with other_weights(self._policy, ((name, older[name]) for name in names)):
                scores = self._scores(self._policy, self._states(self._policy))
            yield self._hypothesis("weights", f"new but for {layer}, that of {owner}", scores)

    def _dtypes(self) -> Iterator[Hypothesis]:
        """The whole model in another dtype, residual stream, norms and logits included."""
        for name, dtype in _DTYPES.items():
            if dtype == self._policy.compute_dtype:
                continue
            model: Any = nn.Module.to(copy.deepcopy(self._policy.model), dtype)
            # No autocast: nothing is computed in any other dtype than this.
            cast = replace(self._policy, model=model, compute_dtype=torch.float32)
            hidden = self._states(cast).to(dtype)
            yield self._hypothesis("dtype", name, self._scores(cast, hidden))

    def _states(self, policy: Policy) -> Tensor:
        return states(policy, self._sequences, self._suspect.rank.pack_tokens)

    def _scores(
        self,
        policy: Policy,
        hidden: Tensor,
        *,
        head: Tensor | None = None,
        temperature: Tensor | None = None,
    ) -> Tensor:
        tokens = self._tokens
        return token_logprobs(
            hidden,
            policy.head if head is None else head,
            tokens.targets,
            tokens.temperature if temperature is None else temperature,
            chunk=self._suspect.rank.head_chunk,
        ).double()

    def _residual(self, scores: Tensor) -> float:
        return float((scores - self._tokens.behaviour).abs().mean())

    def _hypothesis(self, setting: Setting, value: str, scores: Tensor) -> Hypothesis:
        effect = float((scores - self._own).abs().mean())
        return Hypothesis(setting, value, self._residual(scores), effect)


def hypotheses(suspect: Suspect, batch: TrainBatch) -> tuple[Hypothesis, ...]:
    """Every hypothesis about the sequences of the newest weights; none where there are none."""
    if not any(s.staleness == 0 and s.policy_mask[1:].any() for s in batch.sequences):
        return ()
    return tuple(_Trials(suspect, batch).all())


def _layers(names: Iterable[str]) -> dict[str, list[str]]:
    """Parameters by the decoder layer they are in; those in none each alone."""
    found: dict[str, list[str]] = {}
    for name in names:
        layer = _LAYER.match(name)
        found.setdefault(layer.group(1) if layer else name, []).append(name)
    return found


def _minimum(cost: Any) -> float:
    """The log temperature of least cost, by golden-section search."""
    low, high = (math.log(bound) for bound in _TEMPERATURES)
    for _ in range(_SEARCH_STEPS):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        low, high = (low, right) if cost(left) < cost(right) else (left, high)
    return (low + high) / 2


def _unscaled(config: PolicyConfig) -> dict[str, Any]:
    """The rope parameters of the model's own folder."""
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if config.revision is not None:
        options["revision"] = config.revision
    settings = AutoConfig.from_pretrained(config.model, **options)
    settings.standardize_rope_params()
    return dict(settings.rope_parameters)


@contextmanager
def _rope_parameters(model: nn.Module, parameters: Mapping[str, Any]) -> Generator[bool]:
    """The model encodes positions by other parameters for as long; False where it has no module
    for it that can be made anew."""
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            own: Any = child
            if hasattr(own, "inv_freq") and hasattr(own, "config"):
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
