"""What a rank is told at its start, and what it makes of it."""

from dataclasses import dataclass
from pathlib import Path

import torch

from services.common.config import Model
from services.common.spec import PolicyConfig
from services.learner.algorithm_config import AlgorithmConfig
from services.learner.config import OptimizerConfig
from services.learner.rank import checkpoint
from services.learner.rank.config import RankConfig
from services.learner.rank.critic import Critic
from services.learner.rank.model import ModelError, Policy, load
from services.learner.rank.optimizer import Optimizer
from services.learner.rank.reference import Reference
from services.learner.rank.replicas import Place, Replicas
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
    # A checkpoint folder to continue from.
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


def load_models(setup: Setup) -> Models:
    """Loads the run's models, or continues from its checkpoint, and meets the other ranks.

    Raises ModelError, CheckpointError, and ValueError for an algorithm that cannot be run.
    """
    torch.set_num_threads(setup.rank.threads)
    device = _device(setup)
    source = setup.checkpoint
    step = checkpoint.read_step(source) if source else 0
    policy = load(setup.policy, setup.rank, source)
    offload = setup.rank.offload_optimizer
    optimizer = Optimizer(policy.named_parameters(), setup.optimizer, offload=offload)
    if source:
        checkpoint.load_optimizer(source, optimizer)
    reference = _reference(setup, policy)
    several = setup.place.count > 1
    replicas = Replicas.join(setup.place, device) if several else Replicas()
    trainer = Trainer(
        policy,
        optimizer,
        setup.algorithm,
        setup.rank,
        reference=reference,
        critic=_critic(setup, policy),
        replicas=replicas,
    )
    return Models(policy, optimizer, trainer.critic, reference, trainer, replicas, step)


def _device(setup: Setup) -> torch.device:
    """This rank's own; on GPUs it becomes the process's default."""
    if setup.rank.device == "cpu":
        return torch.device("cpu")
    there = torch.cuda.device_count()
    if there < setup.place.count:
        raise ModelError(
            f"learner.rank.processes is {setup.place.count}, but this machine has {there} GPUs: "
            "each rank needs one of its own"
        )
    torch.cuda.set_device(setup.place.index)
    return torch.device("cuda", setup.place.index)


def _reference(setup: Setup, policy: Policy) -> Reference | None:
    if setup.algorithm.kl.coefficient == 0:
        return None
    return Reference.load(setup.policy, policy, offload=setup.rank.offload_reference)


def _critic(setup: Setup, policy: Policy) -> Critic | None:
    """None where a fresh one will do, or none is needed."""
    if setup.algorithm.advantage != "gae" or setup.checkpoint is None:
        return None
    state = checkpoint.load_other(setup.checkpoint, CRITIC)
    return Critic(
        policy,
        setup.algorithm.critic,
        setup.optimizer,
        offload=setup.rank.offload_optimizer,
        state=state,
    )
