"""Checkpoints and publications of ranks without a service, read as whole tensors."""

from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import Tensor

from flotilla_common.weights.fingerprint import checksum64
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.ports import Ranks
from flotilla_learner.rank.adapter_files import BaseRecord
from flotilla_learner.rank.checkpoint import OPTIMIZER
from flotilla_learner.rank.checkpoint_writer import CheckpointWriter
from flotilla_learner.rank.data_parallel import Replicas
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.rank_setup import RankModels
from flotilla_learner.rank.split_loading import MODEL
from flotilla_learner.rank.tensor_shards import ShardFolder
from flotilla_learner.rank.trainer import Trainer
from flotilla_learner.run_files.rank_record import read_shapes
from flotilla_learner.types import CheckpointFiles, Publication


def write_checkpoint(
    directory: Path,
    policy: Policy,
    optimizer: Optimizer,
    step: int,
    base: BaseRecord | None = None,
) -> CheckpointFiles:
    """Write the checkpoint of one rank."""
    trainer = Trainer(policy, optimizer, AlgorithmConfig(), RankConfig())
    models = RankModels(policy, optimizer, None, None, trainer, Replicas(), step, base)
    return write_models(directory, models, step)


def write_models(directory: Path, models: RankModels, step: int) -> CheckpointFiles:
    """Write the checkpoint of one rank with all of its models."""
    writer = CheckpointWriter(0, models.policy.device, models.saved.describe, models.saved.record)
    writer.begin_writing(directory, models.state, step)
    return writer.when_written(lambda files: files).result()


async def save_ranks(ranks: Ranks, directory: Path) -> CheckpointFiles:
    """Have ranks save, and wait until they have."""
    return await (await ranks.begin_checkpoint(directory))


def load_group(directory: Path, group: str) -> dict[str, Tensor]:
    """Return the whole tensors of a group."""
    folder = ShardFolder(directory)
    names = folder.list_group(group)
    shapes = read_shapes(directory, group)
    tensors = {name: torch.empty(shapes[name]) for name in names}
    folder.read_group(group, tensors)
    return tensors


def saved_state(directory: Path) -> dict[str, Tensor]:
    """Return the whole tensors of model and optimizer, for any number of ranks."""
    groups = {group: load_group(directory, group) for group in (MODEL, OPTIMIZER)}
    return {f"{g}/{name}": value for g, found in groups.items() for name, value in found.items()}


def weights_of(publication: Publication) -> dict[str, np.ndarray]:
    """Return the weights, once their checksums are those of the bytes in the file: ranks sum their
    own parts, and the file has what was gathered."""
    raw = np.fromfile(publication.path, np.uint8)
    weights = load_file(publication.path)
    for entry in publication.manifest:
        part = raw[entry.offset_bytes : entry.offset_bytes + weights[entry.name].nbytes]
        assert checksum64(part) == entry.checksum, entry.name
    return weights
