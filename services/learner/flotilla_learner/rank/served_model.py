"""A model that is trained at a caller's request: a policy with gradients and moments of its own."""

import math
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.rank import checkpoint
from flotilla_learner.rank.adapter_files import BaseRecord
from flotilla_learner.rank.checkpoint import CheckpointError
from flotilla_learner.rank.data_parallel import Replicas
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.saved_state import SavedState
from flotilla_learner.rank.split_loading import MODEL, saved_tensors
from flotilla_learner.rank.target_passes import TargetPasses
from flotilla_learner.rank.tensor_shards import ShardFolder, TensorShardError
from flotilla_learner.run_files.rank_record import RECORD_FILE
from flotilla_learner.training_types import AdamUpdate, TargetBatch, TargetScores


class RequestRefused(Exception):
    """A request that changed nothing; `reason` is the contract's."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class ServedModel:
    """A policy, of which all weights or only its own adapters are trained."""

    policy: Policy
    # Of the adapters; None if all weights are trained.
    base: BaseRecord | None
    optimizer: Optimizer

    @staticmethod
    def start(policy: Policy, base: BaseRecord | None) -> "ServedModel":
        """Make a model of a policy, without moments."""
        return ServedModel(policy, base, _make_optimizer(policy))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that are trained."""
        return list(self.policy.trained_parameters().values())

    @property
    def saved(self) -> SavedState:
        return SavedState(self.policy, self.optimizer, self.base)

    def accumulate(
        self, passes: TargetPasses, batch: TargetBatch, replicas: Replicas
    ) -> TargetScores:
        """Return the scores of a batch, and unless only these are wanted, add the gradient of its
        summed loss, over all ranks, to the accumulated one.

        Raises RequestRefused NOT_FINITE for a loss or gradient; then nothing was added."""
        adapters = self.policy.adapters
        used = nullcontext() if adapters is None else adapters.used(adapters.own)
        with used, self._separate_gradient():
            scores = passes.run(self.policy, batch)
            self.optimizer.all_reduce_gradients(replicas)
            norm = 0.0 if batch.forward_only else float(self.optimizer.gradient_norm())
            loss = scores.metrics["loss:sum"]
            if not math.isfinite(loss) or not math.isfinite(norm):
                raise RequestRefused(
                    "NOT_FINITE",
                    f"the loss is {loss} and its gradient's norm {norm}; nothing was accumulated",
                )
        return scores

    @contextmanager
    def _separate_gradient(self) -> Generator[None]:
        """Have the block make a gradient of its own, which is added to the accumulated one unless
        the block fails."""
        parameters = self.parameters
        held = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield
        except BaseException:
            for parameter, gradient in zip(parameters, held, strict=True):
                parameter.grad = gradient
            raise
        for parameter, gradient in zip(parameters, held, strict=True):
            parameter.grad = _add(gradient, parameter.grad)

    def update(self, settings: AdamUpdate) -> float:
        """Update the weights with the accumulated gradient, 0 where there is none, and clear it;
        return its norm before clipping.

        Raises RequestRefused NOT_FINITE for the norm; then nothing has changed."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = self.optimizer.gradient_norm()
        if not torch.isfinite(norm):
            raise RequestRefused(
                "NOT_FINITE", f"the accumulated gradient's norm is {float(norm)}; nothing changed"
            )
        # Not validated: the service has checked what an update may be.
        config = self.optimizer.config.model_copy(
            update={
                "betas": (settings.beta1, settings.beta2),
                "eps": settings.eps,
                "weight_decay": settings.weight_decay,
                "grad_clip": settings.grad_clip_norm,
            }
        )
        self.optimizer.configure(config)
        return self.optimizer.step(settings.learning_rate, norm).grad_norm

    def load(self, folder: Path, *, with_optimizer: bool) -> None:
        """Replace the weights, and on request the moments, by saved ones, and clear the gradient.

        Raises RequestRefused NO_STATE and STATE_MISMATCH; then nothing has changed."""
        if not (folder / RECORD_FILE).is_file():
            raise RequestRefused("NO_STATE", f"{folder} holds no saved state")
        try:
            self._check_weights(folder)
            fresh = None
            if with_optimizer:
                fresh = _make_optimizer(self.policy)
                checkpoint.load_optimizer(folder, fresh)
            self._load_weights(folder)
        except (CheckpointError, ValueError, TensorShardError) as error:
            raise RequestRefused("STATE_MISMATCH", str(error)) from error
        self.optimizer.discard_gradients()
        self.optimizer = fresh or self.optimizer

    def _check_weights(self, folder: Path) -> None:
        if self.base is not None:
            checkpoint.check_adapters(folder, self.policy, self.base)
        elif (saved := checkpoint.read_base(folder)) is not None:
            raise CheckpointError(
                f"{folder} holds only adapters of {saved}; load it into a model with their rank"
            )
        elif set(ShardFolder(folder).list_group(MODEL)) != saved_tensors(self.policy.model).keys():
            raise CheckpointError(f"{folder} holds the weights of another model")

    def _load_weights(self, folder: Path) -> None:
        if self.base is not None:
            checkpoint.load_adapters(folder, self.policy, self.base)
        else:
            ShardFolder(folder).read_group(MODEL, saved_tensors(self.policy.model))


def _make_optimizer(policy: Policy) -> Optimizer:
    # Each update brings its own settings.
    return Optimizer(policy.trained_parameters(), OptimizerConfig())


def _add(held: Tensor | None, new: Tensor | None) -> Tensor | None:
    if held is None or new is None:
        return new if held is None else held
    return held.add_(new)
