"""Body under a critic's head: a copy of the policy's, or adapters beside the policy's own."""

import copy
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn

from flotilla_learner.algo.packing import Segments
from flotilla_learner.rank.lora import CRITIC_ADAPTER, Adapters
from flotilla_learner.rank.model import Policy, body_states
from flotilla_learner.rank.sharding import reshard_unless_grad


class CriticBody(Protocol):
    """Turns tokens into the states that values are read from."""

    @property
    def model(self) -> Any:
        """The model without its head."""
        ...

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the critic trains, by name."""
        ...

    @contextmanager
    def in_use(self) -> Generator[None]:
        """Make passes, including backward ones, the critic's while the context lasts."""
        ...

    def states(self, segments: Segments) -> Tensor:
        """Return the last hidden states [tokens, width]."""
        ...


class CopiedBody:
    """A copy of the policy's body, with parameters of its own. Implements `CriticBody`."""

    def __init__(self, policy: Policy, split: Any | None = None) -> None:
        """Copy the policy's body, or use `split`, of which each rank has a part."""
        self._policy = policy
        self._model: Any = copy.deepcopy(policy.model.base_model) if split is None else split
        self._is_split = split is not None
        if policy.compiled is not None and split is not None:
            # The blocks of a copy are compiled like the policy's.
            policy.compiled.add_model(split)

    @property
    def model(self) -> Any:
        return self._model

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._model.named_parameters())

    @contextmanager
    def in_use(self) -> Generator[None]:
        """See `CriticBody.in_use`: it is always the critic's."""
        yield

    def states(self, segments: Segments) -> Tensor:
        autocast = nullcontext() if self._is_split else self._policy.autocast()
        with autocast, self._policy.offload_context():
            states = body_states(self._model, segments, self._policy.device)
        if self._is_split:
            reshard_unless_grad(self._model)
        return states


class AdaptedBody:
    """The policy's frozen base under the critic's adapters. Implements `CriticBody`."""

    def __init__(self, policy: Policy, adapters: Adapters) -> None:
        self._policy = policy
        self._adapters = adapters
        adapters.add(policy.model, CRITIC_ADAPTER)
        adapters.reset(CRITIC_ADAPTER)

    @property
    def model(self) -> Any:
        """See `CriticBody.model`: the policy's."""
        return self._policy.model.base_model

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """See `CriticBody.named_parameters`: the adapters'."""
        return self._adapters.named_parameters(CRITIC_ADAPTER)

    @contextmanager
    def in_use(self) -> Generator[None]:
        """See `CriticBody.in_use`: recomputation in a backward pass is the critic's, too."""
        with self._adapters.used(CRITIC_ADAPTER):
            yield

    def states(self, segments: Segments) -> Tensor:
        """See `CriticBody.states`; in the compute dtype."""
        return self._policy.segment_states(segments)


def make_critic_body(policy: Policy, split: Any | None) -> CriticBody:
    """Make the body for a policy: adapters beside the policy's if it has any, else `split`, else
    a copy."""
    if policy.adapters is not None:
        return AdaptedBody(policy, policy.adapters)
    return CopiedBody(policy, split)
