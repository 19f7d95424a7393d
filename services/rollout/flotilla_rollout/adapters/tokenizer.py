"""The tokenizer of a Hugging Face folder."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flotilla_common.rpc.errors import ConfigError
from flotilla_rollout.adapters.chat_template_process import TEMPLATES
from flotilla_rollout.tokenizer_port import TemplateError

MAX_ERROR_CHARACTERS = 300
# Any tokenizer has one of these files.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


class TransformersTokenizer:
    """A fast tokenizer with a chat template; `template_options` go to every rendering."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        # Bypasses transformers' processing of text: it does not clean up spaces in sampled text,
        # and a turn costs a third less.
        self._backend = tokenizer.backend_tokenizer
        self.template_options = dict(template_options or {})
        added = tokenizer.added_tokens_decoder.values()
        self.control_tokens: Sequence[str] = [str(token) for token in added if token.special]
        # Also tokens that are not control tokens, such as `<tool_call>` in some vocabularies.
        self.added_tokens: Sequence[str] = [str(token) for token in added]
        template = str(tokenizer.chat_template)
        self.structure_tokens: Sequence[str] = [
            *self.control_tokens,
            *(str(token) for token in added if _is_structure(str(token), template)),
        ]

    @property
    def fast(self) -> PreTrainedTokenizerFast:
        """The tokenizer itself, for adapters of libraries that need it."""
        return self._tokenizer

    @property
    def eos_ids(self) -> list[int]:
        """The id at which an engine ends any text regardless of its parameters; empty if there is
        none."""
        end = self._tokenizer.eos_token_id
        return [end] if isinstance(end, int) else []

    def draw_ordinary(self, count: int) -> NDArray[np.int32]:
        """Draw ids of the vocabulary except those that structure a conversation, the same each
        time."""
        added = self._tokenizer.added_tokens_decoder.keys()
        known = set(self._backend.get_vocab(with_added_tokens=False).values())
        ordinary = np.array(sorted(known - added), np.int32)
        return np.random.default_rng(0).choice(ordinary, count)

    def encode(self, text: str) -> list[int]:
        with _refusing_text(text):
            # As a batch, because that lets other threads run meanwhile.
            [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
            return encoding.ids

    def token_starts(self, text: str) -> list[int]:
        with _refusing_text(text):
            encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            return [start for start, _ in encoded["offset_mapping"]]

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=False)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        shown = [dict(tool) for tool in tools] if tools else None
        try:
            return self._render(messages, shown, add_generation_prompt)
        except (TemplateError, ValueError, TypeError) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            reason = _shorten_text(str(error) or type(error).__name__)
            raise TemplateError(f"the chat template cannot render {roles}: {reason}") from error

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: list[dict[str, Any]] | None,
        generate: bool,
    ) -> str:
        arguments = {
            "conversations": [list(messages)],
            "chat_template": self._tokenizer.get_chat_template(tools=tools),
            "add_generation_prompt": generate,
            **self._tokenizer.special_tokens_map,
            **self.template_options,
        }
        try:
            return TEMPLATES.render_template(tools=tools, **arguments)
        except (TemplateError, ValueError, TypeError):
            if tools is not None:
                raise
        # For a template that iterates over tools in any case.
        return TEMPLATES.render_template(tools=[], **arguments)


def _is_structure(token: str, template: str) -> bool:
    """Return True for a token that looks like a control token, or that the chat template writes.
    Others are text: some vocabularies have tokens for HTML tags, or for runs of spaces."""
    if token.startswith(("<|", "<\uff5c")) or token.endswith(("|>", "\uff5c>")):
        return True
    return token.startswith(("<", "[")) and token in template


@contextmanager
def _refusing_text(text: str) -> Generator[None]:
    """Raise TemplateError for the tokenizer's error on text that is not UTF-8, such as half of a
    character."""
    try:
        yield
    except TypeError as error:
        raise TemplateError(f"a text cannot be tokenised: {_shorten_text(ascii(text))}") from error


def _shorten_text(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARACTERS else f"{text[:MAX_ERROR_CHARACTERS]}..."


def load_tokenizer(
    folder: Path,
    *,
    trust_remote_code: bool = False,
    template_options: Mapping[str, Any] | None = None,
    chat_template: str = "",
) -> TransformersTokenizer:
    """Load the tokenizer of a model folder, with its own chat template or with that of a file.
    Raises OSError if there is no usable one, and ConfigError if there is no such file."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code, use_fast=True
        )
    # tokenizers raises bare `Exception` only.
    except Exception as error:
        problem = f"the tokenizer of {folder} cannot be loaded: {' '.join(str(error).split())}"
        raise OSError(_without_files(folder) or problem) from error
    if isinstance(tokenizer, PreTrainedTokenizerFast) and chat_template:
        tokenizer.chat_template = _read_template(chat_template)
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or not tokenizer.chat_template:
        problem = f"{folder} has no fast tokenizer with a chat template"
        raise OSError(_without_files(folder) or problem)
    return TransformersTokenizer(tokenizer, template_options)


def _read_template(path: str) -> str:
    key = "rollout.dialect.chat_template"
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error}") from error
    if not text.strip():
        raise ConfigError(f"{key}: {path} is empty")
    return text


def _without_files(folder: Path) -> str:
    """Return an error if a folder has no file of a tokenizer, else "": transformers' own message
    differs for each family of models."""
    if any((folder / name).exists() for name in _TOKENIZER_FILES):
        return ""
    return f"{folder} has no tokenizer (none of {', '.join(_TOKENIZER_FILES)})"
