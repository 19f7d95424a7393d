"""Model and optimizer state on disk: safetensors and JSON, nothing that could run code.

A checkpoint folder holds `model.safetensors` (float32, canonical names) with `config.json`, so it
is itself a Hugging Face model folder but for the tokenizer; `optimizer.safetensors`; whatever
else has a state, as `{name}.safetensors`; and `rank.json` with its format, the step and the SHA-256
of them all. A training step draws no random numbers, so there is no generator state to keep.

Of a policy with adapters there are these alone, as PEFT has them: `adapter_model.safetensors` and
`adapter_config.json`; `rank.json` says to which base they belong.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.common.durable_files import sha256_of, sync_path
from services.learner.rank.adapter_files import (
    ADAPTER_FILE,
    BaseRecord,
    describe_other_base,
    load_adapter_values,
    save_adapter_config,
)
from services.learner.rank.model import Policy
from services.learner.rank.optimizer import Optimizer
from services.learner.rank.sharding import gather_named
from services.learner.types import CheckpointFiles

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "rank.json"
CONFIG_FILE = "config.json"
FORMAT = 1


class CheckpointError(Exception):
    """A checkpoint is damaged or belongs to another model; the message names the file."""


def save_checkpoint(
    directory: Path,
    policy: Policy,
    optimizer: Optimizer,
    step: int,
    others: Mapping[str, Mapping[str, Tensor]] = MappingProxyType({}),
    base: BaseRecord | None = None,
) -> CheckpointFiles:
    """Write and fsync the state as of `step`; the digests cover every file.

    `others` are tensors by name, by the name of what they belong to (`critic`). `base` says what
    the adapters of a policy belong to, which alone are saved."""
    directory.mkdir(parents=True, exist_ok=True)
    policy.config.save_pretrained(directory)
    extra = save_adapter_config(policy, base, directory) if base is not None else ()
    tensors: dict[str, Mapping[str, Tensor]] = {
        (ADAPTER_FILE if policy.adapters else MODEL_FILE): policy.saved_parameters(),
        OPTIMIZER_FILE: optimizer.state_tensors(),
        **{f"{name}.safetensors": state for name, state in others.items()},
    }
    for name, values in tensors.items():
        _save_tensors(directory / name, values)
    names = [CONFIG_FILE, *extra, *tensors]
    digests = {name: _sync_and_digest(directory / name) for name in names}
    state = {"format": FORMAT, "step": step, "sha256": digests}
    if base is not None:
        state["base"] = asdict(base)
    (directory / STATE_FILE).write_text(json.dumps(state, indent=1, sort_keys=True) + "\n")
    digests[STATE_FILE] = _sync_and_digest(directory / STATE_FILE)
    sync_path(directory)
    return CheckpointFiles(directory, digests)


def join_checkpoint(
    policy: Policy,
    optimizer: Optimizer,
    others: Mapping[str, Mapping[str, Tensor]] = MappingProxyType({}),
) -> None:
    """Take part in the first rank's `save_checkpoint`, where this one holds a part of the state."""
    for tensors in (policy.saved_parameters(), optimizer.state_tensors(), *others.values()):
        for _ in gather_named(tensors):
            continue


def read_step(directory: Path) -> int:
    """Return the step of a checkpoint, after checking that its files are what was written.

    Raises CheckpointError when one is missing or differs, or a newer program wrote it."""
    try:
        state = json.loads((directory / STATE_FILE).read_text())
        if state["format"] != FORMAT:
            raise CheckpointError(
                f"{directory / STATE_FILE} has format {state['format']}, this program reads and"
                f" writes {FORMAT}: go on with the version of the program that wrote it"
            )
        for name, expected in state["sha256"].items():
            if sha256_of(directory / name) != expected:
                raise CheckpointError(f"{directory / name} is not what was written: remove it")
        return int(state["step"])
    except (OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{directory} holds no whole checkpoint: {error}") from error


def read_base(directory: Path) -> BaseRecord | None:
    """Return the base of a checkpoint's adapters; None for a checkpoint of a whole model."""
    said = json.loads((directory / STATE_FILE).read_text()).get("base")
    return None if said is None else BaseRecord(**said)


def load_adapters(directory: Path, policy: Policy, base: BaseRecord) -> None:
    """Give the policy the adapters of a checkpoint.

    Raises CheckpointError when they are of another base, or of other ranks and layers."""
    saved = read_base(directory)
    if saved is None or saved.fingerprint != base.fingerprint:
        raise CheckpointError(f"{directory}: {describe_other_base(saved, base)}")
    try:
        load_adapter_values(policy, directory, load_file(directory / ADAPTER_FILE))
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{directory / ADAPTER_FILE}: {error}") from error


def load_optimizer(directory: Path, optimizer: Optimizer) -> None:
    """Take over the optimizer's state; CheckpointError when it is of another model."""
    try:
        optimizer.load_state(load_file(directory / OPTIMIZER_FILE))
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{directory / OPTIMIZER_FILE}: {error}") from error


def load_extra_state(directory: Path, name: str) -> dict[str, Tensor]:
    """Return `others[name]` as given to `save_checkpoint`; CheckpointError when it is missing."""
    path = directory / f"{name}.safetensors"
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}: the run was begun without it") from error


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        plain = {name: whole.detach().cpu().contiguous() for name, whole in gather_named(tensors)}
        save_file(plain, path, metadata={"format": "pt"})


def _sync_and_digest(path: Path) -> str:
    sync_path(path)
    return sha256_of(path)
