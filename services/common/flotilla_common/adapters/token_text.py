"""Conversion of token ids back into text, with the policy's own tokenizer and no model library."""

from collections.abc import Callable, Sequence
from pathlib import Path

from huggingface_hub import hf_hub_download
from tokenizers import Tokenizer

Decode = Callable[[Sequence[int]], str]

TOKENIZER_FILE = "tokenizer.json"


class NoTokenizerError(Exception):
    """The policy's tokenizer is not available; the message gives the reason."""


def load_decoder(model: str, revision: str | None = None) -> Decode:
    """Load the decoder of a model folder, or of a hub id that is already in the cache. The decoder
    keeps special tokens.

    Raises NoTokenizerError."""
    tokenizer = load_tokenizer(model, revision)
    return lambda token_ids: tokenizer.decode(list(token_ids), skip_special_tokens=False)


def load_tokenizer(model: str, revision: str | None = None) -> Tokenizer:
    """Load the tokenizer behind `load_decoder`. Raises NoTokenizerError."""
    path = _find_tokenizer_file(model, revision)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises bare Exceptions for any fault in a file.
        raise NoTokenizerError(f"{path} is not a tokenizer: {error}") from error


def _find_tokenizer_file(model: str, revision: str | None) -> Path:
    path = Path(model) / TOKENIZER_FILE
    if path.exists():
        return path
    try:
        return Path(
            hf_hub_download(model, TOKENIZER_FILE, revision=revision, local_files_only=True)
        )
    except (ValueError, OSError) as error:
        # An invalid name raises ValueError, one that was not downloaded raises OSError.
        raise NoTokenizerError(
            f"policy.model {model!r} has no {TOKENIZER_FILE} in this folder ({Path.cwd()})"
            " nor in the"
            " hub's cache"
        ) from error
