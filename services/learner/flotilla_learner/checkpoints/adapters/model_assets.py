"""Files of the policy other than its weights, in a local folder or on the Hugging Face hub."""

from pathlib import Path

from flotilla_common.adapters.model_hub import fetch_files, stage_model
from flotilla_common.files.json_files import read_json_object
from flotilla_common.images.vision_family import VisionFamily, load_vision_family
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import PolicyConfig
from flotilla_common.weights.fingerprint import TokenizerDigests, tokenizer_digests
from flotilla_learner.checkpoints.export import ASSETS, CONFIG, has_adapters, holds_other_parts

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def tokenizer_digests_of(policy: PolicyConfig) -> TokenizerDigests:
    """Return the tokenizer digests of a local folder, or of a model on the Hugging Face hub.
    Raises ConfigError."""
    folder = fetch_files(policy.model, policy.revision, _TOKENIZER)
    try:
        return tokenizer_digests(folder)
    except FileNotFoundError:
        raise ConfigError(f"policy.model: {policy.model} has no tokenizer.json") from None


def vision_family_of(policy: PolicyConfig) -> VisionFamily | None:
    """Return how a model reads pictures; None if the policy is shown none. Raises ConfigError."""
    if policy.vision is None:
        return None
    folder = fetch_files(policy.model, policy.revision, [CONFIG, "preprocessor_config.json"])
    return load_vision_family(folder, policy.vision)


def vocabulary_of(policy: PolicyConfig) -> int:
    """Return the size of a model's vocabulary, from its configuration. Raises ConfigError."""
    folder = fetch_files(policy.model, policy.revision, [CONFIG])
    try:
        settings = read_json_object(folder / CONFIG)
        return int({**settings, **(settings.get("text_config") or {})}["vocab_size"])
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"policy.model: {policy.model} has no {CONFIG} with its vocab_size: {error!r}"
        ) from error


def assets_of(policy: PolicyConfig) -> Path:
    """Return the folder with all of the model's files except its weights. Raises ConfigError."""
    code = ["*.py"] if policy.trust_remote_code else []
    return fetch_files(policy.model, policy.revision, [*ASSETS, *code])


def folder_under(checkpoint: Path, policy: PolicyConfig) -> Path:
    """Return the folder with everything that an export takes from the model: also its weights if
    the checkpoint holds only adapters, or the model has parts that are not trained.
    Raises ConfigError."""
    if has_adapters(checkpoint) or holds_other_parts(checkpoint):
        return stage_model(policy.model, policy.revision)
    return assets_of(policy)
