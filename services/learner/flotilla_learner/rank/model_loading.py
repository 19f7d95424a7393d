"""Model of a policy from its files: Hugging Face's safetensors, as engines serve it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from flotilla_common.images.vision_family import load_vision_family
from flotilla_common.models.multimodal_models import check_trainable_text
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import PolicyConfig
from flotilla_common.text.printable_text import first_line
from flotilla_learner.rank import attention, expert_products
from flotilla_learner.rank.sharding import ShardLayout
from flotilla_learner.rank.split_loading import (
    find_tensor_files,
    has_all_tensors,
    make_empty_model,
    read_parts,
    read_saved_model,
)
from flotilla_learner.rank.tensor_shards import TensorShardError
from flotilla_learner.rank.text_part import model_class

_ERROR_CHARACTERS = 500


class ModelError(Exception):
    """The policy cannot be loaded or trained as configured; the message gives the remedy."""


def read_model(config: PolicyConfig, source: str | Path | None = None) -> PreTrainedModel:
    """Return the model in host memory, float32, with its configured rope. Raises ModelError."""
    place = str(source or config.model)
    try:
        settings, options = _read_settings(config, source)
        if source is not None:
            return read_saved_model(_make_empty(config, settings, options), Path(source), None)
        loaded: Any = model_class(settings, pictures=config.vision is not None).from_pretrained(
            place, use_safetensors=True, output_loading_info=True, config=settings, **options
        )
    except (OSError, ValueError, SafetensorError, TensorShardError) as error:
        raise _make_error(place, error) from error
    model, loading = loaded
    if loading["missing_keys"]:
        # transformers would continue with random numbers in their place.
        missing = sorted(loading["missing_keys"])
        raise ModelError(f"policy.model {place!r} has no weights for {', '.join(missing[:5])}")
    return model


def read_split_model(
    config: PolicyConfig,
    layout: ShardLayout,
    source: str | Path | None = None,
    *,
    prepare: Callable[[PreTrainedModel], None] = lambda _: None,
) -> PreTrainedModel:
    """Read this rank's part of the model, float32, from its files to where it is kept.

    Returns the whole model, in host memory and not split, if the files name parameters differently
    than the model, as for most models with experts. `prepare` may change the parameters' types
    before any of them is split. Raises ModelError."""
    place = str(source or config.model)
    try:
        settings, options = _read_settings(config, source)
        model = _make_empty(config, settings, options)
        if source is not None:
            prepare(model)
            return read_saved_model(model, Path(source), layout)
        files = find_tensor_files(_local_folder(place, options))
        if not has_all_tensors(model, files):
            model = read_model(config, source)
            prepare(model)
            return model
        prepare(model)
        layout.split_module(model)
        read_parts(model, files, layout)
    except (OSError, ValueError, SafetensorError, TensorShardError) as error:
        raise _make_error(place, error) from error
    return model


def read_split_body(config: PolicyConfig, layout: ShardLayout) -> Any:
    """Read this rank's part of `policy.model` without its head, like `read_split_model`. Raises
    ModelError."""
    try:
        settings, options = _read_settings(config, None)
        model: Any = _make_empty(config, settings, options)
        files = find_tensor_files(_local_folder(config.model, options))
        if not has_all_tensors(model, files):
            model, files = read_model(config), {}
        body = model.base_model
        layout.split_module(body)
        if files:
            read_parts(body, files, layout, f"{model.base_model_prefix}.")
    except (OSError, ValueError, SafetensorError) as error:
        raise _make_error(config.model, error) from error
    return body


def find_own_files(config: PolicyConfig) -> dict[str, Path]:
    """Return the file of each tensor of `policy.model`; see `find_tensor_files`."""
    return find_tensor_files(own_folder(config))


def own_folder(config: PolicyConfig) -> Path:
    """Return the folder of `policy.model`'s files."""
    return _local_folder(config.model, _revision(config))


def _revision(config: PolicyConfig) -> dict[str, Any]:
    return {} if config.revision is None else {"revision": config.revision}


def _make_empty(config: PolicyConfig, settings: Any, options: Mapping[str, Any]) -> PreTrainedModel:
    return make_empty_model(settings, options, pictures=config.vision is not None)


def _local_folder(place: str, options: Mapping[str, Any]) -> Path:
    """Return the folder of a model's files; for a model on the hub, its cache folder."""
    if Path(place).is_dir():
        return Path(place)
    found = cached_file(place, "config.json", revision=options.get("revision"))
    assert found is not None, "AutoConfig has just read it"
    return Path(found).parent


def _read_settings(config: PolicyConfig, source: str | Path | None) -> tuple[Any, dict[str, Any]]:
    """Return the model's own configuration with the run's rope, and the arguments to build it."""
    attention.register()
    expert_products.register()
    transformers_logging.disable_progress_bar()
    place = str(source or config.model)
    _refuse_pickle(Path(place))
    options: dict[str, Any] = {"trust_remote_code": config.trust_remote_code}
    if config.revision is not None and source is None:
        options["revision"] = config.revision
    settings = AutoConfig.from_pretrained(place, **options)
    try:
        check_trainable_text(settings.to_dict())
        if config.vision is not None:
            load_vision_family(own_folder(config), config.vision)
    except ConfigError as error:
        raise ModelError(str(error)) from error
    apply_rope_scaling(settings, config)
    return settings, {**options, "dtype": torch.float32, "attn_implementation": _attention(config)}


def _attention(config: PolicyConfig) -> str | dict[str, str]:
    """Return the attention of a model's parts: that of a tower is not causal."""
    if config.vision is None:
        return attention.NAME
    return {"": attention.NAME, "text_config": attention.NAME, "vision_config": "sdpa"}


def _make_error(place: str, error: Exception) -> ModelError:
    """Build the error for a model that transformers does not load. The further lines of its message
    list every class that it has."""
    reason = first_line(str(error), _ERROR_CHARACTERS)
    return ModelError(f"policy.model {place!r} cannot be loaded: {reason}")


def _refuse_pickle(folder: Path) -> None:
    """Refuse a pickled checkpoint, which can run its own code when it is loaded."""
    if any(folder.glob("*.safetensors")):
        return
    pickled = sorted(path.name for path in folder.glob("*.bin") if "model" in path.name)
    if pickled:
        raise ModelError(
            f"policy.model {str(folder)!r} holds pickled weights ({pickled[0]}), which can run "
            "code as they are loaded, and no safetensors: convert it once, in a sandbox, with "
            "model.save_pretrained(folder)"
        )


def apply_rope_scaling(settings: Any, config: PolicyConfig) -> None:
    """Apply `[policy.rope_scaling]` to the model's own rope parameters (theta stays)."""
    scaling = config.rope_scaling
    if scaling is None:
        return
    text = settings.get_text_config()
    text.standardize_rope_params()
    text.rope_parameters = {**text.rope_parameters, **scaling}
    text.max_position_embeddings = config.scaled_positions(text.max_position_embeddings)
    text.standardize_rope_params()
    text.validate_rope()
