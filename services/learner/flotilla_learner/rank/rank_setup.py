"""Setup message of a rank, and the models built from it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from flotilla_common.spec.config import ConfigModel
from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.algo.packing import Segments
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank import checkpoint, initial_broadcast
from flotilla_learner.rank.adapter_files import BASE_MARK, BaseRecord, check_mergeable
from flotilla_learner.rank.canary import canary_token_ids
from flotilla_learner.rank.checkpointing_choice import fit_checkpointing
from flotilla_learner.rank.critic import OPTIMIZER_PREFIX, Critic
from flotilla_learner.rank.data_parallel import RankPlacement, Replicas
from flotilla_learner.rank.learning_rate import WarmSteps
from flotilla_learner.rank.lora import ADAPTER, CRITIC_ADAPTER, REFERENCE_ADAPTER
from flotilla_learner.rank.model import DTYPES, Policy
from flotilla_learner.rank.model_loading import ModelError
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.policy_loading import load_policy, load_split_body, load_split_policy
from flotilla_learner.rank.reference import AdaptedReference, BaseReference, ReferencePolicy
from flotilla_learner.rank.rendezvous_store import Store
from flotilla_learner.rank.saved_state import SavedState
from flotilla_learner.rank.sharding import ShardLayout
from flotilla_learner.rank.trainer import Trainer
from flotilla_learner.types import TrainBatch

# The process's output is the rank's log.
_log = logging.getLogger(__name__)


class RankSetup(ConfigModel):
    """Message that a rank receives at its start."""

    # Prefix of the file names in `shm_dir`.
    name: str
    shm_dir: Path
    total_steps: int
    # Of `total_steps`, those that imitate before the algorithm begins.
    warm: WarmSteps = WarmSteps()
    policy: PolicyConfig
    algorithm: AlgorithmConfig
    optimizer: OptimizerConfig
    rank: RankConfig
    lora: LoraConfig | None = None
    # Checkpoint folder to continue from. Only ranks on the first machine can read it; the others
    # get everything from the first rank.
    checkpoint: Path | None = None
    place: RankPlacement


@dataclass(frozen=True, slots=True)
class RankModels:
    """All models and state that a step changes."""

    policy: Policy
    optimizer: Optimizer
    critic: Critic | None
    # None if no penalty or metric needs it.
    reference: ReferencePolicy | None
    trainer: Trainer
    replicas: Replicas
    # Number of steps behind the parameters.
    step: int
    # Base of the policy's adapters, if it has any.
    base: BaseRecord | None = None
    # Trains the steps of a warm start; None without one.
    imitator: Trainer | None = None

    def trainer_of(self, batch: TrainBatch) -> Trainer:
        """Return the one that trains on a batch like this."""
        return self.imitator if batch.imitated and self.imitator is not None else self.trainer

    def begin_algorithm(self) -> None:
        """Leave the warm start behind: the optimizer begins anew, and the penalty measures from
        what the policy is now."""
        self.optimizer.forget_moments()
        if self.reference is not None:
            self.reference.move_to(self.policy)

    @property
    def saved(self) -> SavedState:
        """What a checkpoint keeps of the policy."""
        return SavedState(self.policy, self.optimizer, self.base)

    @property
    def state(self) -> dict[str, Mapping[str, Tensor]]:
        """Tensors that a checkpoint keeps, by group."""
        groups = self.saved.groups
        if self.critic is not None:
            groups[checkpoint.CRITIC] = self.critic.state_tensors()
        if self.reference is not None and self.reference.has_moved:
            groups[checkpoint.REFERENCE] = self.reference.state_tensors()
        return groups

    @property
    def publication_marks(self) -> dict[str, Tensor]:
        """Tensors published beside adapters: the fingerprint of their base."""
        adapters = self.policy.adapters
        if self.base is None or adapters is None or adapters.merged:
            return {}
        raw = bytearray.fromhex(self.base.fingerprint)
        return {BASE_MARK: torch.frombuffer(raw, dtype=self.policy.compute_dtype)}

    def initial_fingerprint(self) -> bytes | None:
        """Return the fingerprint of the first policy, if it is still used: as the reference,
        or under the adapters.

        Collective for split models. None if adapters are published alone: they carry the base's
        fingerprint, and a checkpoint names it, too."""
        if self.base is not None and self.publication_marks:
            return None
        if self.base is not None:
            return bytes.fromhex(self.base.fingerprint)
        if self.reference is None or self.reference.has_moved:
            return None
        return self.reference.weights_fingerprint()


def load_models(setup: RankSetup, store: Store | None = None) -> RankModels:
    """Load the run's models, or continue from its checkpoint, and join the other ranks.

    `store` is the one that this rank hosts for all, if it does. Raises ModelError,
    CheckpointError, and ValueError for an algorithm that cannot be run."""
    torch.set_num_threads(setup.rank.threads)
    device = select_device(setup.rank, setup.place)
    step = checkpoint.read_step(setup.checkpoint) if setup.checkpoint else 0
    source = _model_source(setup)
    replicas = Replicas()
    if setup.place.count > 1:
        replicas = Replicas.join_process_group(setup.place, device, store)
    layout = _make_layout(setup, device)
    values = setup.algorithm.advantage == "gae"
    if layout is not None:
        names = [ADAPTER, *([CRITIC_ADAPTER] if values else [])]
        names += [REFERENCE_ADAPTER] if _moves_reference(setup) else []
        policy = load_split_policy(setup.policy, setup.rank, layout, source, setup.lora, names)
    else:
        policy = load_policy(setup.policy, setup.rank, source, setup.lora)
    base = _load_adapters(setup, policy)
    if setup.place.spans_machines:
        step = initial_broadcast.broadcast_policy(policy, step, replicas)
    critic = _load_critic(setup, policy, replicas, layout)
    reference = _load_reference(setup, policy, layout)
    if layout is not None:
        policy = policy.split_over_ranks(layout)
    if reference is not None and step > setup.warm.count > 0:
        _restore_reference(setup, reference, replicas)
    optimizer = _load_optimizer(setup, policy, replicas)
    if setup.rank.gradient_checkpointing == "auto" and device.type == "cuda":
        bodies = [policy.model.base_model, *([critic.body] if critic is not None else [])]
        fit_checkpointing(policy, setup.rank, replicas, bodies)
    if policy.compiled is not None:
        _try_compiling(policy, optimizer)
    trainer = Trainer(
        policy,
        optimizer,
        setup.algorithm,
        setup.rank,
        reference=reference,
        critic=critic,
        replicas=replicas,
        steps_before=setup.warm.count,
    )
    imitator = _make_imitator(setup, policy, optimizer, replicas)
    found = (policy, optimizer, trainer.critic, reference, trainer, replicas, step, base)
    return RankModels(*found, imitator=imitator)


def _make_imitator(
    setup: RankSetup, policy: Policy, optimizer: Optimizer, replicas: Replicas
) -> Trainer | None:
    """Make the trainer of a warm start, if there is one. Demonstrations have neither rewards nor
    values: of the run's algorithm nothing holds for them."""
    if not setup.warm.count:
        return None
    return Trainer(policy, optimizer, AlgorithmConfig(), setup.rank, replicas=replicas)


def select_device(config: RankConfig, place: RankPlacement) -> torch.device:
    """Return this rank's own device; a GPU becomes the process's default."""
    if config.device == "cpu":
        return torch.device("cpu")
    there = torch.cuda.device_count()
    if there < place.slots:
        raise ModelError(
            f"learner.rank.processes is {place.slots}, but this machine has {there} GPUs: "
            "each rank needs its own"
        )
    torch.cuda.set_device(place.slot)
    return torch.device("cuda", place.slot)


def _make_layout(setup: RankSetup, device: torch.device) -> ShardLayout | None:
    """Return the split of the models; None if each rank has whole ones."""
    if not setup.rank.shard or setup.place.slots == 1:
        return None
    dtype, offload = DTYPES[setup.policy.dtype], setup.rank.offload_optimizer
    return ShardLayout.over_ranks(setup.place, device, dtype, offload=offload)


def _try_compiling(policy: Policy, optimizer: Optimizer) -> None:
    """Have the policy's blocks compiled or refused now, which takes up to minutes.

    Collective."""
    policy.pass_idly(Segments([canary_token_ids(policy.vocabulary)]))
    optimizer.discard_gradients()


def _model_source(setup: RankSetup) -> Path | None:
    """Return the checkpoint with the whole model; None for the files of `policy.model`."""
    source = setup.checkpoint
    if source is None or setup.lora is not None:
        return None
    if (base := checkpoint.read_base(source)) is not None:
        raise checkpoint.CheckpointError(
            f"{source} holds only adapters of {base}: set learner.lora as at the start of the run"
        )
    return source


def _load_adapters(setup: RankSetup, policy: Policy) -> BaseRecord | None:
    """Load the adapters of the checkpoint into the policy; return their base."""
    if policy.adapters is None:
        return None
    check_mergeable(policy, setup.policy)
    base = BaseRecord.of_policy(policy, setup.policy)
    if setup.checkpoint is not None:
        checkpoint.load_adapters(setup.checkpoint, policy, base)
    return base


def _load_reference(
    setup: RankSetup, policy: Policy, layout: ShardLayout | None
) -> ReferencePolicy | None:
    if not setup.algorithm.kl.needs_reference:
        return None
    if policy.adapters is not None:
        kind = AdaptedReference if _moves_reference(setup) else BaseReference
        return kind(policy, policy.adapters)
    offload = setup.rank.offload_reference
    own = None if layout is None else replace(layout, offload=offload)
    return ReferencePolicy.from_config(setup.policy, policy, offload=offload, layout=own)


def _moves_reference(setup: RankSetup) -> bool:
    return setup.algorithm.kl.needs_reference and setup.warm.count > 0


def _restore_reference(setup: RankSetup, reference: ReferencePolicy, replicas: Replicas) -> None:
    """Give the reference the weights with which the warm start ended."""
    tensors = reference.state_tensors()
    if setup.checkpoint is not None:
        checkpoint.load_reference(setup.checkpoint, tensors)
    if setup.place.spans_machines:
        initial_broadcast.broadcast_tensors(tensors.values(), replicas)
    reference.has_moved = True


def _load_critic(
    setup: RankSetup, policy: Policy, replicas: Replicas, layout: ShardLayout | None
) -> Critic | None:
    """Build the critic, from its saved state if there is one; None if none is needed."""
    if setup.algorithm.advantage != "gae":
        return None
    source, spans = setup.checkpoint, setup.place.spans_machines

    def fill(parameters: Mapping[str, Tensor]) -> None:
        if source is not None:
            checkpoint.load_critic_parameters(source, parameters)
        if spans:
            initial_broadcast.broadcast_tensors(parameters.values(), replicas)

    body = None
    if layout is not None and setup.lora is None:
        body = load_split_body(setup.policy, setup.rank, layout)
    critic = Critic(
        policy,
        setup.algorithm.critic,
        setup.optimizer,
        offload=setup.rank.offload_optimizer,
        fill=fill,
        layout=layout,
        body=body,
    )
    if source is not None:
        checkpoint.load_optimizer(source, critic.optimizer, checkpoint.CRITIC, OPTIMIZER_PREFIX)
    if spans:
        initial_broadcast.broadcast_optimizer_state(critic.optimizer, replicas)
    return critic


def _load_optimizer(setup: RankSetup, policy: Policy, replicas: Replicas) -> Optimizer:
    # Split parameters are offloaded by their layout instead.
    offload = setup.rank.offload_optimizer and not policy.is_split
    optimizer = Optimizer(policy.trained_parameters(), setup.optimizer, offload=offload)
    if setup.checkpoint:
        checkpoint.load_optimizer(setup.checkpoint, optimizer)
    if setup.place.spans_machines:
        initial_broadcast.broadcast_optimizer_state(optimizer, replicas)
    return optimizer
