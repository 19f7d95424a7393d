"""Model and optimizer state on disk: safetensors and JSON, nothing that could run code.

A checkpoint folder holds the tensors of all groups of state (`model`, `optimizer`, ...), each under
`GROUP/NAME` and in float32 (a reference in its own types), in the files of the ranks that hold them
(see `tensor_shards`); the model's `config.json`; and `rank.json` with the step and the shapes of
all tensors (see `run_files/rank_record.py`). For a policy with adapters it holds only these, as
`adapters/NAME`, with their PEFT configuration; `rank.json` names their base. The service adds a
manifest with the SHA-256 of each file, and verifies the files before ranks read them. A training
step draws no random numbers, so there is no generator state to keep.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from flotilla_common.files.durable_files import sha256_of, sync_path
from flotilla_learner.rank.adapter_files import (
    BaseRecord,
    check_adapter_config,
    describe_other_base,
)
from flotilla_learner.rank.critic import MODEL_PREFIX
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.tensor_shards import (
    ShardFolder,
    TensorShardError,
    shard_pattern,
    write_parts,
)
from flotilla_learner.run_files.rank_record import (
    RECORD_FILE,
    RankRecordError,
    read_record,
    write_record,
)
from flotilla_learner.types import CheckpointFiles

OPTIMIZER, ADAPTERS, CRITIC, REFERENCE = "optimizer", "adapters", "critic", "reference"
CONFIG_FILE = "config.json"


class CheckpointError(Exception):
    """A checkpoint is damaged or belongs to another model; the message names the file."""


def write_rank_files(directory: Path, tensors: Mapping[str, Tensor], rank: int) -> CheckpointFiles:
    """Write and fsync a rank's parts of flattened tensors in host memory."""
    directory.mkdir(parents=True, exist_ok=True)
    write_parts(directory, tensors, rank)
    names = sorted(path.name for path in directory.glob(shard_pattern(rank)))
    return CheckpointFiles(directory, {name: sha256_of(directory / name) for name in names})


def write_run_files(
    directory: Path,
    describe: Callable[[Path], Sequence[str]],
    shapes: Mapping[str, Sequence[int]],
    **facts: object,
) -> CheckpointFiles:
    """Write and fsync the files common to all ranks: descriptions of the state, which `describe`
    writes and names, and the record with the step and the shapes of all ranks' tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    names = [*describe(directory), RECORD_FILE]
    write_record(directory, shapes, **facts)
    for name in names:
        sync_path(directory / name)
    return CheckpointFiles(directory, {name: sha256_of(directory / name) for name in names})


def read_step(directory: Path) -> int:
    """Return the step of a checkpoint. Raises CheckpointError."""
    try:
        return int(read_record(directory)["step"])
    except RankRecordError as error:
        raise CheckpointError(str(error)) from error
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{directory / RECORD_FILE} names no step: {error!r}") from error


def read_base(directory: Path) -> BaseRecord | None:
    """Return the base of a checkpoint's adapters; None for a checkpoint of a whole model."""
    base = read_record(directory).get("base")
    return None if base is None else BaseRecord(**base)


def check_adapters(directory: Path, policy: Policy, base: BaseRecord) -> None:
    """Raise CheckpointError unless `load_adapters` can load a checkpoint."""
    saved = read_base(directory)
    if saved is None or saved.fingerprint != base.fingerprint:
        raise CheckpointError(f"{directory}: {describe_other_base(saved, base)}")
    try:
        check_adapter_config(policy, directory)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory}: {error}") from error


def load_adapters(directory: Path, policy: Policy, base: BaseRecord) -> None:
    """Load the adapters of a checkpoint into the policy.

    Raises CheckpointError if they have another base, or other ranks and layers."""
    check_adapters(directory, policy, base)
    try:
        ShardFolder(directory).read_group(ADAPTERS, policy.saved_parameters())
    except TensorShardError as error:
        raise CheckpointError(f"{directory}: {error}") from error


def load_optimizer(
    directory: Path, optimizer: Optimizer, group: str = OPTIMIZER, prefix: str = ""
) -> None:
    """Load the optimizer's state, whose names in the group begin with the prefix.

    Raises CheckpointError if it belongs to another model."""
    try:
        folder = ShardFolder(directory)
        saved = (name for name in folder.list_group(group) if name.startswith(prefix))
        optimizer.add_empty_state([name.removeprefix(prefix) for name in saved])
        folder.read_group(group, _prefix_names(optimizer.state_tensors(), prefix))
    except (ValueError, TensorShardError) as error:
        raise CheckpointError(f"{directory}: {error}") from error


def load_critic_parameters(directory: Path, parameters: Mapping[str, Tensor]) -> None:
    """Load the parameters of a checkpoint into a critic, or this rank's part of it.

    Raises CheckpointError if there are none, or if they belong to another model."""
    wanted = _prefix_names(parameters, MODEL_PREFIX)
    try:
        folder = ShardFolder(directory)
        saved = {name for name in folder.list_group(CRITIC) if name.startswith(MODEL_PREFIX)}
        if not saved:
            raise CheckpointError(f"{directory} has no critic: the run started without one")
        if saved != wanted.keys():
            raise CheckpointError(f"{directory}: the critic's state belongs to another model")
        folder.read_group(CRITIC, wanted)
    except TensorShardError as error:
        raise CheckpointError(f"{directory}: {error}") from error


def load_reference(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Load the weights of the reference with which a run goes on after its warm start.

    Raises CheckpointError if there are none, or if they belong to another model."""
    try:
        folder = ShardFolder(directory)
        if not folder.list_group(REFERENCE):
            raise CheckpointError(
                f"{directory} has no reference policy: at the run's warm start its algorithm.kl"
                " needed none"
            )
        folder.read_group(REFERENCE, tensors)
    except TensorShardError as error:
        raise CheckpointError(f"{directory}: {error}") from error


def _prefix_names(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}
