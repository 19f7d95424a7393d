"""Where a policy's thinking starts and ends in its tokens."""

from collections.abc import Sequence

from services.rollout.ports import Tokenizer

OPEN, CLOSE = "<think>", "</think>"


class ThinkingMarks:
    """The marks around a thinking that comes first in a turn, and ends at their first close."""

    def __init__(
        self, tokenizer: Tokenizer, start: str, marks: tuple[str, str] = (OPEN, CLOSE)
    ) -> None:
        """Create them; `start` is a prompt, which may open the policy's thinking."""
        self._tokenizer = tokenizer
        self._open, self._close = marks
        self._open_id = self._find_id(self._open)
        self._close_id = self._find_id(self._close)
        # True when the template itself starts the policy's thinking: it then only closes it.
        self.is_open = start.rfind(self._open) > start.rfind(self._close)

    def count_tokens(self, ids: Sequence[int], thought: str | None = None) -> int:
        """Count the tokens of the thinking, its marks included; all when it is never closed.

        `thought` is its text where another reader has found it, by marks of its own."""
        if self._open_id is None or self._close_id is None:
            return self._count_by_text(ids) if thought is None else self._count_text(thought)
        if not self.is_open and not self._starts_thinking(ids):
            return 0 if thought is None else self._count_text(thought)
        for position, token in enumerate(ids):
            if token == self._close_id:
                return position + 1
        return len(ids)

    def _starts_thinking(self, ids: Sequence[int]) -> bool:
        for token in ids:
            if token == self._open_id:
                return True
            if self._tokenizer.decode([token]).strip():
                return False
        return False

    def _count_text(self, text: str) -> int:
        return len(self._tokenizer.encode(text))

    def _count_by_text(self, ids: Sequence[int]) -> int:
        text = self._tokenizer.decode(ids)
        if not self.is_open and not text.lstrip().startswith(self._open):
            return 0
        end = text.find(self._close)
        return len(ids) if end < 0 else self._count_text(text[: end + len(self._close)])

    def _find_id(self, mark: str) -> int | None:
        """Return the id of a mark that is one token."""
        ids = self._tokenizer.encode(mark)
        return ids[0] if len(ids) == 1 else None
