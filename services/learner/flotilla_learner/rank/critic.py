"""Value model of generalised advantage estimation."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flotilla_learner.algo.critic import clipped_value_loss
from flotilla_learner.config.algorithm import CriticConfig
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.rank.critic_body import make_critic_body
from flotilla_learner.rank.model import IDLE_SEGMENTS, Policy
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.packed_rows import Pack, PackTargets
from flotilla_learner.rank.sharding import ShardLayout, reshard_unless_grad

# Prefixes in the names of saved parameters and moments.
MODEL_PREFIX, OPTIMIZER_PREFIX = "model.", "optimizer."


class Critic:
    """A copy of the policy's body, or adapters beside the policy's, with a scalar head and an
    optimizer of its own.

    The head starts at zero, so that the first advantages are those of a constant baseline. The
    value of a token is read from the state that predicts it, the one before it.
    """

    def __init__(
        self,
        policy: Policy,
        config: CriticConfig,
        optimizer: OptimizerConfig,
        *,
        offload: bool = False,
        fill: Callable[[Mapping[str, nn.Parameter]], None] | None = None,
        layout: ShardLayout | None = None,
        body: Any | None = None,
    ) -> None:
        """Build the critic; `optimizer` is the policy's: all but the learning rate comes from it.

        `fill` replaces the parameters' initial values before the optimizer copies
        them. With a `layout` each rank keeps a part; for a policy without adapters, `body` is this
        rank's."""
        self.config = config
        self._body = make_critic_body(policy, body)
        self._head = nn.Linear(policy.width, 1, device=policy.device)
        nn.init.zeros_(self._head.weight)
        nn.init.zeros_(self._head.bias)
        self._is_split = layout is not None
        if layout is not None:
            # Values are small differences of large numbers.
            replace(layout, compute_dtype=torch.float32).split_module(self._head)
        if fill is not None:
            fill(self.named_parameters())
        chosen = optimizer.model_copy(update={"lr": config.lr})
        self.optimizer = Optimizer(
            self.named_parameters(), chosen, offload=offload and layout is None
        )

    @property
    def body(self) -> Any:
        """The model without its head."""
        return self._body.model

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return parameters of body and head by name."""
        head = self._head.named_parameters()
        return {
            **{f"body.{name}": value for name, value in self._body.named_parameters().items()},
            **{f"head.{name}": parameter for name, parameter in head},
        }

    def predict_values(self, pack: Pack, targets: PackTargets) -> Tensor:
        """Return the value of each policy token of a pack [policy tokens], float32."""
        with self._body.in_use():
            states = self._body.states(pack.segments)
        # Outside of autocast: values are small differences of large numbers.
        values = self._head(states[targets.positions].float()).squeeze(1)
        if self._is_split:
            reshard_unless_grad(self._head)
        return values

    def pass_idly(self) -> None:
        """Take part in the other ranks' pass over a pack; see `Policy.pass_idly`."""
        with self._body.in_use():
            values = self._head(self._body.states(IDLE_SEGMENTS).float())
            if torch.is_grad_enabled():
                (0.0 * values.sum()).backward()
        reshard_unless_grad(self._head)

    def accumulate_gradient(
        self,
        pack: Pack,
        targets: PackTargets,
        old: Tensor,
        returns: Tensor,
        weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Add the gradient of a pack's weighted value loss.

        Return the loss and the number of tokens clipped, both on the device."""
        values = self.predict_values(pack, targets)
        found = clipped_value_loss(values, old, returns, self.config.value_clip)
        loss = (found.loss * weights).sum()
        with self._body.in_use():
            loss.backward()
        return loss.detach(), torch.count_nonzero(found.clipped)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return parameters and moments by name, for a checkpoint."""
        moments = self.optimizer.state_tensors()
        return {
            **{MODEL_PREFIX + n: value.detach() for n, value in self.named_parameters().items()},
            **{OPTIMIZER_PREFIX + name: value for name, value in moments.items()},
        }
