"""The policy's tokenizer files, wherever they are."""

from pathlib import Path

from services.common.errors import ConfigError
from services.common.fingerprint import TokenizerDigests, tokenizer_digests
from services.common.spec import PolicyConfig


def tokenizer_digests_of(policy: PolicyConfig) -> TokenizerDigests:
    """Of a local folder, or of a model on the Hugging Face hub. Raises ConfigError."""
    folder = Path(policy.model)
    if not folder.is_dir():
        folder = _downloaded(policy)
    try:
        return tokenizer_digests(folder)
    except FileNotFoundError:
        raise ConfigError(f"policy.model: {policy.model} has no tokenizer.json") from None


def _downloaded(policy: PolicyConfig) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    try:
        return Path(
            snapshot_download(policy.model, revision=policy.revision, allow_patterns=patterns)
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        raise ConfigError(
            f"policy.model: {policy.model} is neither a folder here nor a model on the hub that"
            f" can be reached: {error}"
        ) from error
