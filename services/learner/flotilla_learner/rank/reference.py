"""Frozen policy that the KL penalty measures from."""

import copy
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.rank.lora import REFERENCE_ADAPTER, Adapters, freeze_model
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.model_loading import read_model, read_split_model
from flotilla_learner.rank.sharding import ShardLayout, local_tensor
from flotilla_learner.rank.weight_slots import fingerprint_weights


class ReferencePolicy:
    """The run's initial policy, or that with which its warm start ended; it is never trained or
    published, and saved only if no file of the model holds it.

    Kept in the compute dtype: half of the policy's own size in bfloat16. Its logprobs are, bit
    for bit, those of a policy that is still the initial one (except for rounding, if blocks are
    compiled). It routes tokens by itself, whatever experts the engine has chosen.
    """

    def __init__(self, frozen: Policy, home: torch.device) -> None:
        self._policy = replace(frozen, routing=None)
        if frozen.compiled is not None:
            frozen.compiled.add_model(frozen.model)
        # Device of the parameters while they are not used.
        self._home = home
        # True once it is another policy than the run's initial one.
        self.has_moved = False

    @staticmethod
    def from_config(
        config: PolicyConfig, policy: Policy, *, offload: bool, layout: ShardLayout | None = None
    ) -> "ReferencePolicy":
        """Load the reference from `policy.model`, whatever checkpoint the policy continues from.

        With a `layout` each rank reads and keeps its part, on the layout's device."""
        if layout is None:
            return _freeze_policy(read_model(config), policy, offload=offload)
        freeze = partial(freeze_model, dtype=policy.compute_dtype)
        model = read_split_model(config, layout, prepare=freeze)
        frozen = replace(policy, model=model, run_body=None).split_over_ranks(layout)
        return ReferencePolicy(frozen, policy.device)

    @staticmethod
    def copy_of(policy: Policy, *, offload: bool) -> "ReferencePolicy":
        """Copy the policy as it is now; for a policy with adapters, use the model under them."""
        if policy.adapters is not None:
            return BaseReference(policy, policy.adapters)
        return _freeze_policy(copy.deepcopy(policy.model), policy, offload=offload)

    def weights_fingerprint(self) -> bytes:
        """Return the fingerprint under which these weights were published.

        Collective for a split reference."""
        return fingerprint_weights(self._policy.named_parameters(), self._policy.compute_dtype)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return its weights by name, each rank's parts of a split reference."""
        return {name: value.detach() for name, value in self._policy.named_parameters().items()}

    @torch.no_grad()
    def move_to(self, policy: Policy) -> None:
        """Become the policy as it is now."""
        now = self._weights_of(policy)
        for name, own in self.state_tensors().items():
            local_tensor(own).copy_(local_tensor(now[name]))
        self.has_moved = True

    def _weights_of(self, policy: Policy) -> Mapping[str, Tensor]:
        return policy.named_parameters()

    @contextmanager
    def on_policy_device(self) -> Generator[Policy]:
        """Keep the reference on the policy's device while the context lasts."""
        if self._home == self._policy.device:
            yield self._policy
            return
        model = self._policy.model
        nn.Module.to(model, self._policy.device)
        try:
            yield self._policy
        finally:
            nn.Module.to(model, self._home)


def _freeze_policy(model: PreTrainedModel, policy: Policy, *, offload: bool) -> ReferencePolicy:
    """Freeze `model`, which has the same architecture as `policy`."""
    freeze_model(model, policy.compute_dtype)
    home = torch.device("cpu") if offload else policy.device
    nn.Module.to(model, home)
    return ReferencePolicy(replace(policy, model=model, run_body=None), home)


class BaseReference(ReferencePolicy):
    """The model under the policy's own adapters: it takes no memory of its own. It cannot move."""

    def __init__(self, policy: Policy, adapters: Adapters) -> None:
        super().__init__(policy, policy.device)
        self._adapters = adapters

    @contextmanager
    def on_policy_device(self) -> Generator[Policy]:
        """See `ReferencePolicy.on_policy_device`; the policy has no adapters meanwhile."""
        with self._adapters.used(None):
            yield self._policy


class AdaptedReference(ReferencePolicy):
    """The policy's base under a further adapter, which takes the values of the policy's own when
    the reference moves."""

    def __init__(self, policy: Policy, adapters: Adapters) -> None:
        super().__init__(policy, policy.device)
        self._adapters = adapters
        adapters.add(policy.model, REFERENCE_ADAPTER)
        adapters.reset(REFERENCE_ADAPTER)

    def state_tensors(self) -> dict[str, Tensor]:
        """See `ReferencePolicy.state_tensors`: the adapter's matrices."""
        named = self._adapters.named_parameters(REFERENCE_ADAPTER).items()
        return {name: value.detach() for name, value in named}

    def _weights_of(self, policy: Policy) -> Mapping[str, Tensor]:
        return policy.trained_parameters()

    @contextmanager
    def on_policy_device(self) -> Generator[Policy]:
        """See `ReferencePolicy.on_policy_device`; the policy has this adapter meanwhile."""
        with self._adapters.used(REFERENCE_ADAPTER):
            yield self._policy
