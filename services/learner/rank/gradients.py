"""Adds the gradients of a mini-batch to the models, a pack at a time."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.learner.algo.logprob_head import fused_policy_loss
from services.learner.algo.objective import Objective, ObjectiveSums, PackTokens
from services.learner.rank.critic import Critic
from services.learner.rank.data_parallel import Replicas
from services.learner.rank.model import Policy
from services.learner.rank.packed_rows import ByRow, Packer, Targets, by_row
from services.learner.rank.step_preparation import Example


@dataclass(frozen=True, slots=True)
class Sums:
    """Over the policy tokens of one mini-batch, so that packs and ranks add up."""

    loss: float = 0.0
    entropy: float = 0.0
    value_loss: float = 0.0
    value_clipped: int = 0
    value_tokens: int = 0
    objective: ObjectiveSums = field(default_factory=ObjectiveSums)

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(
            self.loss + other.loss,
            self.entropy + other.entropy,
            self.value_loss + other.value_loss,
            self.value_clipped + other.value_clipped,
            self.value_tokens + other.value_tokens,
            self.objective + other.objective,
        )

    def over(self, replicas: Replicas) -> "Sums":
        """Those of all ranks."""
        *plain, nested = astuple(self)
        own = (*plain, *nested)
        summed = replicas.total(*own)
        # Counts stay whole numbers.
        values = [type(mine)(total) for mine, total in zip(own, summed, strict=True)]
        objective = ObjectiveSums(*values[len(plain) :])
        return replace(Sums(*values[: len(plain)]), objective=objective)


@dataclass(slots=True)
class Seen:
    """Of this rank's share of the rows: what the policy gave them, and how uncertain it was."""

    logprobs: ByRow = field(default_factory=dict[int, NDArray[np.float32]])
    entropy: ByRow = field(default_factory=dict[int, NDArray[np.float32]])


class Accumulator:
    """Forward and backward passes of policy and critic."""

    def __init__(
        self,
        policy: Policy,
        critic: Critic | None,
        packer: Packer,
        *,
        chunk: int,
        entropy_bonus: bool,
    ) -> None:
        self._policy = policy
        self._critic = critic
        self._packer = packer
        self._chunk = chunk
        self._entropy_bonus = entropy_bonus

    def policy(self, examples: Sequence[Example], objective: Objective) -> tuple[Sums, Seen]:
        """Adds the gradient of the objective on this rank's share of the examples."""
        sums, seen = Sums(), Seen()
        for pack in self._packs(examples):
            sums += self._policy_pack(pack, objective, seen)
        return sums, seen

    def critic(self, examples: Sequence[Example]) -> Sums:
        """Adds the gradient of the value loss on this rank's share of the examples."""
        sums = Sums()
        for pack in self._packs(examples):
            sums += self._critic_pack(pack)
        return sums

    def _packs(self, examples: Sequence[Example]) -> list[list[Example]]:
        by_index = {example.row.index: example for example in examples}
        packs = self._packer.packs([example.row for example in examples])
        return [[by_index[row.index] for row in pack] for pack in packs]

    def _policy_pack(self, pack: Sequence[Example], objective: Objective, seen: Seen) -> Sums:
        rows = [example.row for example in pack]
        targets = Targets.of(rows, self._policy.device)
        hidden = self._policy.hidden([row.token_ids for row in rows])[targets.positions]
        on_pack = objective.on(_pack_tokens(pack, targets))
        loss, logprobs, entropy = fused_policy_loss(
            hidden,
            self._policy.head,
            targets.token_ids,
            targets.temperature,
            on_pack,
            chunk=self._chunk,
            coupled=objective.coupled,
            entropy_weights=on_pack.entropy_weights if self._entropy_bonus else None,
        )
        loss.backward()
        seen.logprobs |= by_row(logprobs, rows)
        seen.entropy |= by_row(entropy, rows)
        return Sums(
            loss=float(loss.detach()),
            entropy=float(entropy.double().sum()),
            objective=on_pack.sums,
        )

    def _critic_pack(self, pack: Sequence[Example]) -> Sums:
        assert self._critic is not None
        device = self._policy.device
        rows = [example.row for example in pack]
        targets = Targets.of(rows, device)
        loss, clipped = self._critic.backward(
            rows,
            targets,
            _joined([example.values for example in pack], device),
            _joined([example.returns for example in pack], device),
            _spread([example.weight for example in pack], targets),
        )
        return Sums(value_loss=loss, value_clipped=clipped, value_tokens=len(targets.token_ids))


def _pack_tokens(pack: Sequence[Example], targets: Targets) -> PackTokens:
    device = targets.positions.device
    first = pack[0]
    return PackTokens(
        behaviour=_joined([example.row.behaviour for example in pack], device),
        advantages=_joined([example.advantages for example in pack], device),
        weights=_spread([example.weight for example in pack], targets),
        sequence=targets.sequence,
        count=len(pack),
        staleness=_spread([example.row.staleness for example in pack], targets),
        proximal=None
        if first.proximal is None
        else _joined([example.proximal for example in pack], device),
        reference=None
        if first.reference is None
        else _joined([example.reference for example in pack], device),
    )


def _joined(arrays: Sequence[NDArray[np.floating] | None], device: torch.device) -> Tensor:
    """Arrays of a pack's rows, which are there for all or for none, end to end as float32."""
    there = [array for array in arrays if array is not None]
    return torch.from_numpy(np.concatenate(there).astype(np.float32)).to(device)


def _spread(values: Sequence[float], targets: Targets) -> Tensor:
    """One value of each row, at each of its policy tokens."""
    by_sequence = torch.tensor(values, dtype=torch.float32, device=targets.sequence.device)
    return by_sequence[targets.sequence]
