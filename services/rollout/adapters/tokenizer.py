"""The tokenizer of a Hugging Face folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast


class TransformersTokenizer:
    """A fast tokenizer with a chat template; `template_options` go to every rendering."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._options = dict(template_options or {})
        added = tokenizer.added_tokens_decoder.values()
        self.control_tokens: Sequence[str] = [str(token) for token in added if token.special]

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        rendered = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] if tools else None,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **self._options,
        )
        return str(rendered)


def load_tokenizer(
    model: str | Path,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    template_options: Mapping[str, Any] | None = None,
) -> TransformersTokenizer:
    """The tokenizer of a folder or hub id. Raises OSError when there is none."""
    tokenizer = AutoTokenizer.from_pretrained(
        str(model), revision=revision, trust_remote_code=trust_remote_code, use_fast=True
    )
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or not tokenizer.chat_template:
        raise OSError(f"{model} has no fast tokenizer with a chat template")
    return TransformersTokenizer(tokenizer, template_options)
