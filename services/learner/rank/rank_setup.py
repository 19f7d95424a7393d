"""A rank's setup message, and the models it builds from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from services.common.config import ConfigModel
from services.common.spec import PolicyConfig
from services.learner.config.algorithm import AlgorithmConfig
from services.learner.config.learner import OptimizerConfig
from services.learner.config.rank import RankConfig
from services.learner.rank import checkpoint, initial_broadcast
from services.learner.rank.critic import Critic
from services.learner.rank.data_parallel import RankPlacement, Replicas
from services.learner.rank.model import ModelError, Policy, load_policy
from services.learner.rank.optimizer import Optimizer
from services.learner.rank.reference import ReferencePolicy
from services.learner.rank.rendezvous_store import Store
from services.learner.rank.trainer import Trainer

CRITIC_STATE = "critic"


class RankSetup(ConfigModel):
    """The message that a rank is given at its start."""

    # Begins the names of the files in `shm_dir`.
    name: str
    shm_dir: Path
    total_steps: int
    policy: PolicyConfig
    algorithm: AlgorithmConfig
    optimizer: OptimizerConfig
    rank: RankConfig
    # A checkpoint folder to continue from. Ranks of other machines than the first do not see it,
    # and get everything from the first rank.
    checkpoint: Path | None = None
    place: RankPlacement


@dataclass(frozen=True, slots=True)
class RankModels:
    """All models and state that a step changes."""

    policy: Policy
    optimizer: Optimizer
    critic: Critic | None
    # None where nothing is measured from it.
    reference: ReferencePolicy | None
    trainer: Trainer
    replicas: Replicas
    # The steps behind the parameters.
    step: int

    def save_checkpoint(self, directory: Path, step: int) -> checkpoint.CheckpointFiles:
        """Write a checkpoint of the state as of `step`."""
        others = {CRITIC_STATE: self.critic.state_tensors()} if self.critic is not None else {}
        return checkpoint.save_checkpoint(directory, self.policy, self.optimizer, step, others)

    def join_checkpoint(self) -> None:
        """Take part in the first rank's saving, where this one holds a part of the state."""
        checkpoint.join_checkpoint(self.policy, self.optimizer)


def load_models(setup: RankSetup, store: Store | None = None) -> RankModels:
    """Load the run's models, or continue from its checkpoint, and meet the other ranks.

    `store` is the one that this rank hosts for all, if it does. Raises ModelError,
    CheckpointError, and ValueError for an algorithm that cannot be run."""
    torch.set_num_threads(setup.rank.threads)
    device = _select_device(setup)
    source = setup.checkpoint
    step = checkpoint.read_step(source) if source else 0
    policy = load_policy(setup.policy, setup.rank, source)
    several = setup.place.count > 1
    replicas = Replicas.join_process_group(setup.place, device, store) if several else Replicas()
    if setup.rank.shard and several:
        policy = policy.split_over_ranks(setup.place.count)
    if setup.place.spans_machines:
        step = initial_broadcast.broadcast_policy(policy, step, replicas)
    offload = setup.rank.offload_optimizer
    optimizer = Optimizer(policy.named_parameters(), setup.optimizer, offload=offload)
    if source:
        checkpoint.load_optimizer(source, optimizer)
    critic = (
        checkpoint.load_extra_state(source, CRITIC_STATE) if source and _uses_critic(setup) else {}
    )
    if setup.place.spans_machines:
        critic = initial_broadcast.broadcast_optimizer_state(optimizer, critic, replicas)
    reference = _load_reference(setup, policy)
    trainer = Trainer(
        policy,
        optimizer,
        setup.algorithm,
        setup.rank,
        reference=reference,
        critic=_restore_critic(setup, policy, critic),
        replicas=replicas,
    )
    return RankModels(policy, optimizer, trainer.critic, reference, trainer, replicas, step)


def _select_device(setup: RankSetup) -> torch.device:
    """Return this rank's own device; a GPU becomes the process's default."""
    if setup.rank.device == "cpu":
        return torch.device("cpu")
    there = torch.cuda.device_count()
    if there < setup.place.slots:
        raise ModelError(
            f"learner.rank.processes is {setup.place.slots}, but this machine has {there} GPUs: "
            "each rank needs one of its own"
        )
    torch.cuda.set_device(setup.place.slot)
    return torch.device("cuda", setup.place.slot)


def _load_reference(setup: RankSetup, policy: Policy) -> ReferencePolicy | None:
    if setup.algorithm.kl.coefficient == 0:
        return None
    return ReferencePolicy.from_config(setup.policy, policy, offload=setup.rank.offload_reference)


def _uses_critic(setup: RankSetup) -> bool:
    return setup.algorithm.advantage == "gae"


def _restore_critic(setup: RankSetup, policy: Policy, state: Mapping[str, Tensor]) -> Critic | None:
    """Rebuild the critic from its saved state; None where none is needed or a fresh one will do."""
    if not state:
        return None
    return Critic(
        policy,
        setup.algorithm.critic,
        setup.optimizer,
        offload=setup.rank.offload_optimizer,
        state=state,
    )
