"""Port of the tokenizer, with its chat template."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class TemplateError(ValueError):
    """The chat template or the tokenizer cannot render the next input; the message has the
    reason."""


class Tokenizer(Protocol):
    """Conversion of text to token ids and back, and the model's chat template."""

    @property
    def control_tokens(self) -> Sequence[str]:
        """Tokens that structure a conversation, such as `<|im_end|>`, as text."""
        ...

    @property
    def structure_tokens(self) -> Sequence[str]:
        """Tokens that data must not spell, as text: the control tokens, and those that act as such
        without being declared, such as DeepSeek's `<\uff5cUser\uff5c>` or `<tool_call>`."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`; control tokens in it become their ids, nothing is added.

        Raises TemplateError."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, control tokens included."""
        ...

    def token_starts(self, text: str) -> list[int]:
        """Return for each token of `text` the character where it starts. Raises TemplateError."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        """Return the conversation as the model reads it, as text. Raises TemplateError."""
        ...
