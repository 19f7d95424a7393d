"""Turns token ids back into text, with the policy's own tokenizer and no model library."""

from collections.abc import Callable, Sequence
from pathlib import Path

from huggingface_hub import hf_hub_download
from tokenizers import Tokenizer

Decode = Callable[[Sequence[int]], str]

_FILE = "tokenizer.json"


class NoTokenizerError(Exception):
    """The policy's tokenizer cannot be had; the message says why."""


def decoder(model: str, revision: str | None = None) -> Decode:
    """Of a model folder, or of a hub id that was downloaded before. Special tokens are shown.

    Raises NoTokenizerError.
    """
    path = _path(model, revision)
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        # The library raises bare Exceptions for whatever is wrong with a file.
        raise NoTokenizerError(f"{path} is no tokenizer: {error}") from error
    return lambda token_ids: tokenizer.decode(list(token_ids), skip_special_tokens=False)


def _path(model: str, revision: str | None) -> Path:
    path = Path(model) / _FILE
    if path.exists():
        return path
    try:
        return Path(hf_hub_download(model, _FILE, revision=revision, local_files_only=True))
    except (ValueError, OSError) as error:
        # A name that the hub cannot have is a ValueError, one that was not downloaded an OSError.
        raise NoTokenizerError(
            f"policy.model {model!r} has no {_FILE} in this folder ({Path.cwd()}) nor in the"
            " hub's cache"
        ) from error
