"""What a rank is told at its start, and what it makes of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from services.common.config import Model
from services.common.spec import PolicyConfig
from services.learner.config.algorithm import AlgorithmConfig
from services.learner.config.learner import OptimizerConfig
from services.learner.config.rank import RankConfig
from services.learner.rank import checkpoint, initial_broadcast
from services.learner.rank.critic import Critic
from services.learner.rank.data_parallel import Place, Replicas
from services.learner.rank.model import ModelError, Policy, load
from services.learner.rank.optimizer import Optimizer
from services.learner.rank.reference import Reference
from services.learner.rank.rendezvous import Store
from services.learner.rank.step import Trainer

CRITIC = "critic"


class Setup(Model):
    """What a rank is told at its start."""

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
    place: Place


@dataclass(frozen=True, slots=True)
class Models:
    """Everything that a step changes."""

    policy: Policy
    optimizer: Optimizer
    critic: Critic | None
    # None where nothing is measured from it.
    reference: Reference | None
    trainer: Trainer
    replicas: Replicas
    # The steps behind the parameters.
    step: int

    def save(self, directory: Path, step: int) -> checkpoint.CheckpointFiles:
        """Writes a checkpoint of the state as of `step`."""
        others = {CRITIC: self.critic.state()} if self.critic is not None else {}
        return checkpoint.save(directory, self.policy, self.optimizer, step, others)


def load_models(setup: Setup, store: Store | None = None) -> Models:
    """Loads the run's models, or continues from its checkpoint, and meets the other ranks.

    `store` is the one that this rank holds for all, if it does. Raises ModelError,
    CheckpointError, and ValueError for an algorithm that cannot be run.
    """
    torch.set_num_threads(setup.rank.threads)
    device = _device(setup)
    source = setup.checkpoint
    step = checkpoint.read_step(source) if source else 0
    policy = load(setup.policy, setup.rank, source)
    several = setup.place.count > 1
    replicas = Replicas.join(setup.place, device, store) if several else Replicas()
    if setup.place.far:
        step = initial_broadcast.take_policy(policy, step, replicas)
    offload = setup.rank.offload_optimizer
    optimizer = Optimizer(policy.named_parameters(), setup.optimizer, offload=offload)
    if source:
        checkpoint.load_optimizer(source, optimizer)
    critic = checkpoint.load_other(source, CRITIC) if source and _has_critic(setup) else {}
    if setup.place.far:
        critic = initial_broadcast.take_state(optimizer, critic, replicas)
    reference = _reference(setup, policy)
    trainer = Trainer(
        policy,
        optimizer,
        setup.algorithm,
        setup.rank,
        reference=reference,
        critic=_critic(setup, policy, critic),
        replicas=replicas,
    )
    return Models(policy, optimizer, trainer.critic, reference, trainer, replicas, step)


def _device(setup: Setup) -> torch.device:
    """This rank's own; on GPUs it becomes the process's default."""
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


def _reference(setup: Setup, policy: Policy) -> Reference | None:
    if setup.algorithm.kl.coefficient == 0:
        return None
    return Reference.load(setup.policy, policy, offload=setup.rank.offload_reference)


def _has_critic(setup: Setup) -> bool:
    return setup.algorithm.advantage == "gae"


def _critic(setup: Setup, policy: Policy, state: Mapping[str, Tensor]) -> Critic | None:
    """None where a fresh one will do, or none is needed."""
    if not state:
        return None
    return Critic(
        policy,
        setup.algorithm.critic,
        setup.optimizer,
        offload=setup.rank.offload_optimizer,
        state=state,
    )
