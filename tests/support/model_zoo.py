"""Real tokenizers and chat templates, as `make zoo` has fetched them."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cache
from pathlib import Path

import mistral_common
import pytest
from transformers import AddedToken, PreTrainedTokenizerFast
from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

from tools.model_zoo.zoo import ZOO, read_archives, read_listing

SMALL = "small"
TEKKEN = "tekken"
# Merges of the small vocabulary: the first of a real one's.
_SMALL_MERGES = 8_000
_TEKKEN_FILE = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"


def need_zoo(folder: str) -> Path:
    """Return a folder of the zoo; skip the test where it has not been fetched."""
    archive = next(archive for archive in read_archives() if archive.folder == folder)
    if read_listing(ZOO, archive) is None:
        pytest.skip(f"{archive.package} is not in build/zoo: run `make zoo`")
    return ZOO / folder


def read_template(path: str) -> str:
    """Read a chat template by its path below `templates/`."""
    folder, name = path.split("/")
    return (need_zoo(f"templates/{folder}") / name).read_text()


def make_tokenizer(
    vocabulary: str,
    control_tokens: Sequence[str] = (),
    template: str | None = None,
    renamed: Mapping[str, str] | None = None,
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a real vocabulary, or the small one, and more control tokens.

    `renamed` are tokens that a vocabulary keeps in reserve for control tokens."""
    tokenizer = copy(_load(vocabulary, tuple(control_tokens), tuple((renamed or {}).items())))
    tokenizer.chat_template = template
    return tokenizer


@cache
def _load(
    vocabulary: str, control_tokens: Sequence[str], renamed: Sequence[tuple[str, str]]
) -> PreTrainedTokenizerFast:
    """Return a tokenizer without a template: loading a large one takes a second."""
    file = _vocabulary_file(vocabulary)
    if renamed:
        file = _make_once(f"{vocabulary}-renamed.json", lambda: _rename(file, renamed))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(file))
    new: list[str | AddedToken] = [
        AddedToken(token, special=True, normalized=False) for token in control_tokens
    ]
    tokenizer.add_tokens(new, special_tokens=True)
    return tokenizer


def _rename(file: Path, renamed: Sequence[tuple[str, str]]) -> str:
    text = file.read_text()
    for reserved, name in renamed:
        text = text.replace(json.dumps(reserved), json.dumps(name))
    return text


@cache
def _vocabulary_file(vocabulary: str) -> Path:
    if vocabulary == TEKKEN:
        return _make_once("tekken.json", _make_tekken)
    if vocabulary == SMALL:
        return _make_once("small.json", _make_small)
    return need_zoo(f"tokenizers/{vocabulary}") / "tokenizer.json"


def _make_once(name: str, make: Callable[[], str]) -> Path:
    path = ZOO / "made" / name
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(make())
        unfinished.replace(path)
    return path


def _make_tekken() -> str:
    """Mistral's own vocabulary, as its package ships it."""
    return convert_tekken_tokenizer(str(_TEKKEN_FILE)).backend_tokenizer.to_str()


def _make_small() -> str:
    """The start of a real vocabulary: every text can be written, and it loads at once."""
    whole = json.loads((need_zoo("tokenizers/gpt35turbo") / "tokenizer.json").read_text())
    model = whole["model"]
    merges = model["merges"][:_SMALL_MERGES]
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
    kept = {"".join(pair) for pair in pairs}
    vocab = [token for token in model["vocab"] if len(token) == 1 or token in kept]
    model["vocab"] = {token: number for number, token in enumerate(vocab)}
    model["merges"] = merges
    whole["added_tokens"] = []
    return json.dumps(whole)
