"""What a rollout worker needs from the world, in its own words."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Text to token ids and back, and the model's chat template."""

    @property
    def control_tokens(self) -> Sequence[str]:
        """The tokens that structure a conversation, such as `<|im_end|>`, as text."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; control tokens in it become their ids, nothing is added."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens included."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        """The conversation as the model reads it, as text."""
        ...
