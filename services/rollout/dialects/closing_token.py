"""The token that a chat template writes after the end of a conversation."""

from collections.abc import Mapping
from typing import Any

from services.rollout.ports import Tokenizer


def find_closing_token(tokenizer: Tokenizer, question: Mapping[str, Any]) -> str:
    """Return the token, which the next turn replaces; empty if there is none.

    Phi-3's template writes `<|endoftext|>` besides the `<|end|>` of every turn."""
    alone = tokenizer.apply_chat_template([question], None, False)
    prompt = tokenizer.apply_chat_template([question], None, True)
    ends = [token for token in tokenizer.control_tokens if alone.endswith(token)]
    end = max(ends, key=len, default="")
    replaced = prompt.startswith(alone.removesuffix(end)) and not prompt.startswith(alone)
    return end if replaced else ""
