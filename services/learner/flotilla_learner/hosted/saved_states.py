"""Checkpoints of a run whose model is at a service: `tinker.json`, the address of its state."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from flotilla_common.files.durable_files import sync_path, write_durably
from flotilla_common.rpc.errors import ConfigError
from flotilla_learner.run_files.checkpoint_manifest import HOSTED_STATE
from flotilla_learner.types import CheckpointFiles


@dataclass(frozen=True, slots=True)
class HostedState:
    """The content of `tinker.json`."""

    # Of weights and optimizer, at the service.
    address: str
    base_model: str
    lora_rank: int
    step: int
    # Tokens that the run had trained on.
    trained_tokens: int


_STATE = TypeAdapter(HostedState)


def write_state(directory: Path, state: HostedState) -> CheckpointFiles:
    """Write a checkpoint's file, durably."""
    data = (json.dumps(asdict(state), indent=1) + "\n").encode()
    directory.mkdir(parents=True, exist_ok=True)
    write_durably(directory / HOSTED_STATE, data)
    sync_path(directory)
    return CheckpointFiles(directory, {HOSTED_STATE: hashlib.sha256(data).hexdigest()})


def read_state(directory: Path, base_model: str, lora_rank: int) -> HostedState:
    """Return the state of a checkpoint. Raises ConfigError if it is of another model."""
    path = directory / HOSTED_STATE
    try:
        state = _STATE.validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f'learner.engine: "tinker", but {directory} is a checkpoint of own ranks: set it to'
            ' "ranks", or start a new run'
        ) from None
    except (OSError, ValidationError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    for name, given, saved in (
        ("policy.tinker.model", base_model, state.base_model),
        ("learner.lora.rank", lora_rank, state.lora_rank),
    ):
        if given != saved:
            raise ConfigError(
                f"{name}: {given}, but the run trains {saved}: set it to that, or start a new run"
            )
    return state
