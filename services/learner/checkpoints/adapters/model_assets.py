"""The policy's files other than its weights, in a local folder or on the Hugging Face hub."""

from collections.abc import Sequence
from pathlib import Path

from services.common.errors import ConfigError
from services.common.fingerprint import TokenizerDigests, tokenizer_digests
from services.common.spec import PolicyConfig
from services.learner.checkpoints.export import ASSETS


def tokenizer_digests_of(policy: PolicyConfig) -> TokenizerDigests:
    """Return the tokenizer digests of a local folder, or of a model on the Hugging Face hub.
    Raises ConfigError."""
    folder = _resolve_folder(
        policy, ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    )
    try:
        return tokenizer_digests(folder)
    except FileNotFoundError:
        raise ConfigError(f"policy.model: {policy.model} has no tokenizer.json") from None


def assets_of(policy: PolicyConfig) -> Path:
    """Return the folder with all of the model's files except its weights. Raises ConfigError."""
    return _resolve_folder(policy, [*ASSETS, *(["*.py"] if policy.trust_remote_code else [])])


def _resolve_folder(policy: PolicyConfig, patterns: Sequence[str]) -> Path:
    folder = Path(policy.model)
    return folder if folder.is_dir() else _download_files(policy, patterns)


def _download_files(policy: PolicyConfig, patterns: Sequence[str]) -> Path:
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
