"""Gradients of a mini-batch, added to the models one pack at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flotilla_learner.algo.logprob_head import fused_policy_loss
from flotilla_learner.algo.objective import Objective, ObjectiveSums, PackTokens, add_fields
from flotilla_learner.rank.critic import Critic
from flotilla_learner.rank.data_parallel import Replicas
from flotilla_learner.rank.device_transfer import to_device
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.packed_rows import Pack, PackTargets, RowPacker, split_by_row
from flotilla_learner.rank.rows import ByRow
from flotilla_learner.rank.step_examples import TrainExample


@dataclass(frozen=True, slots=True)
class MiniBatchSums:
    """Sums over the policy tokens of one mini-batch, so that packs and ranks add up."""

    loss: float = 0.0
    entropy: float = 0.0
    value_loss: float = 0.0
    value_clipped: int = 0
    value_tokens: int = 0
    # Tokens of the policy's rows, and tokens computed for them: prompts may be shared.
    row_tokens: int = 0
    computed_tokens: int = 0
    # See `RoutingDifferences`.
    routed_tokens: int = 0
    rerouted_tokens: int = 0
    routed_choices: int = 0
    rerouted_choices: int = 0
    objective: ObjectiveSums = field(default_factory=ObjectiveSums)

    def __add__(self, other: "MiniBatchSums") -> "MiniBatchSums":
        return add_fields(self, other)

    def sum_over_ranks(self, replicas: Replicas) -> "MiniBatchSums":
        *plain, nested = astuple(self)
        own = (*plain, *nested)
        summed = replicas.sum_numbers(*own)
        # Counts stay integers.
        values = [type(mine)(total) for mine, total in zip(own, summed, strict=True)]
        objective = ObjectiveSums(*values[len(plain) :])
        return replace(MiniBatchSums(*values[: len(plain)]), objective=objective)


@dataclass(slots=True)
class RankTokenStats:
    """Logprobs and entropy that the policy assigned to this rank's share of the rows, and the
    weights of their corrections."""

    logprobs: ByRow = field(default_factory=dict[int, NDArray[np.float32]])
    entropy: ByRow = field(default_factory=dict[int, NDArray[np.float32]])
    corrections: ByRow = field(default_factory=dict[int, NDArray[np.float32]])


@dataclass(frozen=True, slots=True)
class GradientAccumulator:
    """Forward and backward passes of policy and critic."""

    policy: Policy
    critic: Critic | None
    packer: RowPacker
    chunk: int
    entropy_bonus: bool

    def add_policy_gradients(
        self, examples: Sequence[TrainExample], objective: Objective
    ) -> tuple[MiniBatchSums, RankTokenStats]:
        """Add the gradient of the objective on this rank's share of the examples."""
        by_index = {example.row.index: example for example in examples}
        packs = self.packer.iter_packs([example.row for example in examples])
        done = [self._add_policy_pack(pack, by_index, objective) for pack in packs]
        return _read_policy_packs([each for each in done if each is not None])

    def add_critic_gradients(self, examples: Sequence[TrainExample]) -> MiniBatchSums:
        """Add the gradient of the value loss on this rank's share of the examples."""
        by_index = {example.row.index: example for example in examples}
        packs = self.packer.iter_packs([example.row for example in examples])
        done = [self._add_critic_pack(pack, by_index) for pack in packs]
        found = [each for each in done if each is not None]
        sums = MiniBatchSums()
        figures = _read_together([figures for figures, _ in found])
        for (loss, clipped), (_, tokens) in zip(figures, found, strict=True):
            sums += MiniBatchSums(value_loss=loss, value_clipped=int(clipped), value_tokens=tokens)
        return sums

    def _add_policy_pack(
        self, pack: Pack, examples: Mapping[int, TrainExample], objective: Objective
    ) -> "_PolicyPack | None":
        if not pack.rows:
            self.policy.pass_idly()
            return None
        rows, segments = pack.rows, pack.segments
        targets = PackTargets.from_pack(pack, self.policy.device)
        routed = self.policy.make_pass(segments)
        hidden = self.policy.segment_states(segments, routed)[targets.positions]
        chosen = [examples[row.index] for row in rows]
        tokens = _make_pack_tokens(chosen, targets)
        token_ids = targets.token_ids
        if objective.compares_tokens:
            likeliest, teacher = _teacher_tokens(chosen, token_ids.device)
            tokens = replace(tokens, teacher=teacher)
            token_ids = torch.cat([token_ids[:, None], likeliest], 1)
        on_pack = objective.make_pack_loss(tokens)
        loss, logprobs, entropy = fused_policy_loss(
            hidden,
            self.policy.head,
            token_ids,
            targets.temperature,
            on_pack,
            chunk=self.chunk,
            coupled=objective.coupled,
            entropy_weights=on_pack.entropy_weights if self.entropy_bonus else None,
            banned=self.policy.banned,
            candidates=targets.candidates,
        )
        loss.backward()
        figures = torch.stack([loss.detach().double(), entropy.double().sum()])
        figures = torch.cat([figures, on_pack.measure()])
        replayed = asdict(routed.count_differences()) if routed is not None else {}
        sampled = logprobs.view(len(logprobs), -1)[:, 0]
        computed = sum(segments.lengths)
        return _PolicyPack(pack, computed, figures, sampled, entropy, on_pack.applied, replayed)

    def _add_critic_pack(
        self, pack: Pack, examples: Mapping[int, TrainExample]
    ) -> tuple[Tensor, int] | None:
        """Return the pack's loss and number of tokens clipped, and its number of tokens."""
        assert self.critic is not None
        if not pack.rows:
            self.critic.pass_idly()
            return None
        device = self.policy.device
        chosen = [examples[row.index] for row in pack.rows]
        targets = PackTargets.from_pack(pack, device)
        loss, clipped = self.critic.accumulate_gradient(
            pack,
            targets,
            _concat_arrays([example.values for example in chosen], device),
            _concat_arrays([example.returns for example in chosen], device),
            _expand_to_tokens([example.weight for example in chosen], targets),
        )
        return torch.stack([loss.double(), clipped.double()]), len(targets.token_ids)


@dataclass(frozen=True, slots=True)
class _PolicyPack:
    """A pack whose gradients are done, with figures that are still on the device.

    Reading them blocks on the device, and the host can prepare the next pack instead."""

    pack: Pack
    computed_tokens: int
    # Loss, sum of the entropies, and the objective's measurements.
    figures: Tensor
    # Per policy token.
    logprobs: Tensor
    entropy: Tensor
    corrections: Tensor
    # See `RoutingDifferences`.
    routing: Mapping[str, int]


def _read_policy_packs(done: Sequence[_PolicyPack]) -> tuple[MiniBatchSums, RankTokenStats]:
    """Read the figures of all packs at once."""
    sums = MiniBatchSums()
    read = _read_together([each.figures for each in done])
    for each, (loss, entropy, *measured) in zip(done, read, strict=True):
        sums += MiniBatchSums(
            loss=loss,
            entropy=entropy,
            row_tokens=each.pack.row_tokens,
            computed_tokens=each.computed_tokens,
            objective=ObjectiveSums.from_figures(measured),
            **each.routing,
        )
    rows = [row for each in done for row in each.pack.rows]
    return sums, RankTokenStats(
        split_by_row([each.logprobs for each in done], rows),
        split_by_row([each.entropy for each in done], rows),
        split_by_row([each.corrections for each in done], rows),
    )


def _read_together(figures: Sequence[Tensor]) -> list[list[float]]:
    return torch.stack(list(figures)).tolist() if figures else []


def _make_pack_tokens(pack: Sequence[TrainExample], targets: PackTargets) -> PackTokens:
    device = targets.positions.device
    first = pack[0]
    return PackTokens(
        behaviour=_concat_arrays([example.row.behaviour for example in pack], device),
        advantages=_concat_arrays([example.advantages for example in pack], device),
        weights=_expand_to_tokens([example.weight for example in pack], targets),
        sequence=targets.sequence,
        count=len(pack),
        staleness=_expand_to_tokens([example.row.staleness for example in pack], targets),
        proximal=None
        if first.proximal is None
        else _concat_arrays([example.proximal for example in pack], device),
        reference=None
        if first.reference is None
        else _concat_arrays([example.reference for example in pack], device),
        held=None
        if first.held is None
        else _concat_arrays([example.held for example in pack], device).bool(),
    )


def _teacher_tokens(pack: Sequence[TrainExample], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the teacher's likeliest tokens at each policy token of a pack, and its logprobs of
    them, [n, k] each. Raises ValueError for a sequence that it has not scored."""
    found = [example.teacher for example in pack]
    known = [scores for scores in found if scores is not None]
    if len(known) < len(found):
        raise ValueError("a sequence of a distilled step was not scored by the teacher")
    ids = np.concatenate([scores.top_ids for scores in known]).astype(np.int64)
    logprobs = np.concatenate([scores.top_logprobs for scores in known]).astype(np.float32)
    return to_device(ids, device), to_device(logprobs, device)


def _concat_arrays(
    arrays: Sequence[NDArray[np.floating | np.bool_] | None], device: torch.device
) -> Tensor:
    """Concatenate the arrays of a pack's rows as float32; either all rows have one or none has."""
    there = [array for array in arrays if array is not None]
    return to_device(np.concatenate(there).astype(np.float32), device)


def _expand_to_tokens(values: Sequence[float], targets: PackTargets) -> Tensor:
    """Repeat each row's value at each of its policy tokens."""
    by_sequence = to_device(np.array(values, np.float32), targets.sequence.device)
    return by_sequence[targets.sequence]
