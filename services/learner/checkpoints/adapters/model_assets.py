"""The policy's files beside its weights, wherever they are."""

from collections.abc import Sequence
from pathlib import Path

from services.common.errors import ConfigError
from services.common.fingerprint import TokenizerDigests, tokenizer_digests
from services.common.spec import PolicyConfig
from services.learner.checkpoints.export import ASSETS


def tokenizer_digests_of(policy: PolicyConfig) -> TokenizerDigests:
    """Of a local folder, or of a model on the Hugging Face hub. Raises ConfigError."""
    folder = _folder(policy, ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
    try:
        return tokenizer_digests(folder)
    except FileNotFoundError:
        raise ConfigError(f"policy.model: {policy.model} has no tokenizer.json") from None


def assets_of(policy: PolicyConfig) -> Path:
    """The folder with all that belongs to the model but its weights. Raises ConfigError."""
    return _folder(policy, [*ASSETS, *(["*.py"] if policy.trust_remote_code else [])])


def _folder(policy: PolicyConfig, patterns: Sequence[str]) -> Path:
    folder = Path(policy.model)
    return folder if folder.is_dir() else _downloaded(policy, patterns)


def _downloaded(policy: PolicyConfig, patterns: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(policy.model, revision=policy.revision, allow_patterns=list(patterns))
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ConfigError(
            f"policy.model: {policy.model} is neither a folder here nor a model on the hub that"
            f" can be reached: {error}"
        ) from error
