"""Check of the policy's files: they must be safe to load, and match the model that the run trains.

Only names, headers and JSON are read; nothing is loaded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flotilla_common.files.json_files import read_json_object
from flotilla_common.images.vision_family import load_vision_family
from flotilla_common.models.multimodal_models import check_trainable_text
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.checkpoints.tensor_files import TensorFileError, read_header

_CONFIG, _INDEX = "config.json", "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# Configuration that two models with interchangeable weights share.
_SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)


def check_model_files(policy: PolicyConfig, run_dir: Path) -> None:
    """Raise ConfigError if a local model cannot be used. From the hub, the ranks load only
    safetensors."""
    folder = Path(policy.model)
    if not folder.is_dir():
        return
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ConfigError(_without_weights(folder))
    try:
        for path in weights:
            read_header(path)
    except TensorFileError as error:
        raise ConfigError(f"policy.model: {error}; fetch the model again") from error
    check_trainable_text(_read_json_object(folder / _CONFIG))
    if policy.vision is not None:
        load_vision_family(folder, policy.vision)
    _check_index(folder)
    _check_same_model(folder, run_dir)


def _without_weights(folder: Path) -> str:
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if not pickles:
        return f"policy.model: {folder} has no *.safetensors"
    return (
        f"policy.model: {folder} has its weights as {pickles[0]}, a pickle, which can run any code"
        " when it is loaded; convert it to safetensors in a safe place, or choose a model"
        " that has them"
    )


def _check_index(folder: Path) -> None:
    """Check that all shards named in an index are in the folder."""
    path = folder / _INDEX
    if not path.exists():
        return
    try:
        names = set(_read_json_object(path)["weight_map"].values())
    except (KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"policy.model: {path} is not an index of shards: {error!r}") from error
    for name in sorted(str(name) for name in names):
        if "/" in name or not name.endswith(".safetensors") or not (folder / name).is_file():
            raise ConfigError(f"policy.model: {path} names {name!r}, which is not a weight file")


def _check_same_model(folder: Path, run_dir: Path) -> None:
    saved = sorted(run_dir.glob(f"checkpoints/step-*/{_CONFIG}"))
    if not saved:
        return
    given, began = (_read_shape(path) for path in (folder / _CONFIG, saved[-1]))
    for name in _SHAPE:
        if name in given and name in began and given[name] != began[name]:
            raise ConfigError(
                f"policy.model: {folder} is another model than this run trains: its {name} is"
                f" {given[name]!r}, in {saved[-1].parent} it is {began[name]!r}; restore it, or"
                " start a new run"
            )


def _read_shape(path: Path) -> Mapping[str, Any]:
    """Return a model's configuration, with that of its text part beside it if it has one."""
    settings = _read_json_object(path)
    return {**(settings.get("text_config") or {}), **settings}


def _read_json_object(path: Path) -> Mapping[str, Any]:
    try:
        return read_json_object(path)
    except ValueError as error:
        raise ConfigError(f"policy.model: {error}") from error
