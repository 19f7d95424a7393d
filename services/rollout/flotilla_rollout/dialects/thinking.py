"""The start and end of a policy's thinking in its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from flotilla_rollout.tokenizer_port import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
# Placeholders of a thinking and of the text after it, in a rendered turn.
THOUGHT, ANSWER = "POLICYTHOUGHT", "POLICYSAID"
# Tokens of blank text that are skipped before a mark.
_SPACES = 8


@dataclass(frozen=True, slots=True)
class ThinkingForm:
    """Form of a thinking: its marks, and the text that ends an unfinished one."""

    open: str = OPEN
    close: str = CLOSE
    end: str = f"\n{CLOSE}\n\n"


class ThinkingMarks:
    """The marks around a thinking that comes first in a turn, and ends at the first close."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        start: str,
        shown: str = "",
        form: ThinkingForm = ThinkingForm(),
    ) -> None:
        """Create them. `start` is a prompt, which may open the policy's thinking; `shown` is a turn
        of THOUGHT and ANSWER rendered by the template, which ends a thinking in its own way."""
        self._tokenizer = tokenizer
        self._open, self._close = form.open, form.close
        end = shown.partition(THOUGHT)[2].partition(ANSWER)[0]
        self._end = end if form.close in end else form.end
        self._open_id = self._find_id(self._open)
        self._close_id = self._find_id(self._close)
        # True if the template itself opens the policy's thinking: the policy then only closes it.
        self.is_open = start.rfind(self._open) > start.rfind(self._close)

    def count_tokens(self, ids: Sequence[int], thought: str | None = None) -> int:
        """Count the tokens of the thinking, including its marks; all if it is never closed.

        `thought` is its text if another reader has found it, by its own marks."""
        if not self._thinks(ids):
            return 0 if thought is None else len(self._tokenizer.encode(thought))
        end = self._find_end(ids)
        return len(ids) if end is None else end

    def find_text(self, ids: Sequence[int]) -> tuple[int, int]:
        """Return the start and end of the text between the marks in the tokens of a thinking."""
        opening = [] if self.is_open else self._tokenizer.encode(self._open)
        closing = self._tokenizer.encode(self._close)
        within = range(min(_SPACES, len(ids)))
        begin = next((n for n in within if list(ids[n : n + len(opening)]) == opening), None)
        start = 0 if begin is None else begin + len(opening)
        end = len(ids)
        if list(ids[end - len(closing) :]) == closing and end - len(closing) >= start:
            end -= len(closing)
        return start, end

    def strip_marks(self, text: str) -> str:
        """Return the text of a thinking without the marks that `find_text` may leave: some are
        spelled by tokens that spell other text too."""
        return text.removeprefix(self._open).removesuffix(self._close).strip()

    def is_thinking(self, ids: Sequence[int]) -> bool:
        """Return True if a turn of these ids ends inside its thinking."""
        return self._thinks(ids) and self._find_end(ids) is None

    @property
    def end_ids(self) -> list[int]:
        """Ids that end a thinking in place of the policy; empty if the tokenizer has no token for
        it."""
        return [] if self._close_id is None else self._tokenizer.encode(self._end)

    def wrap(self, thought: str) -> str:
        """Return a thinking between its marks, for the start of a turn."""
        return f"{self._open}\n{thought}{self._end}"

    def follow_prompt(self, prompt: str, thought: str, whole: str) -> str | None:
        """Return what a turn says after a prompt that begins its thinking, where the template shows
        the turn without one: `whole` is the conversation up to the turn's end. None if it differs
        in more than that."""
        begin = prompt.rfind(self._open)
        if begin < 0 or not whole.startswith(prompt[:begin]):
            return None
        return (f"{thought}{self._end}" if self.is_open else "") + whole[begin:]

    def _thinks(self, ids: Sequence[int]) -> bool:
        """Return True if the turn is, or begins with, a thinking."""
        if self.is_open:
            return True
        if self._open_id is None:
            # Marks of several tokens, of which the first few are sufficient.
            begin = self._tokenizer.decode(ids[: len(self._open) + _SPACES]).lstrip()
            return begin.startswith(self._open)
        for token in ids:
            if token == self._open_id:
                return True
            if self._tokenizer.decode([token]).strip():
                return False
        return False

    def _find_end(self, ids: Sequence[int]) -> int | None:
        """Return the number of tokens up to and including the first close."""
        if self._close_id is not None:
            return next((at + 1 for at, token in enumerate(ids) if token == self._close_id), None)
        text = self._tokenizer.decode(ids)
        end = text.find(self._close)
        return None if end < 0 else len(self._tokenizer.encode(text[: end + len(self._close)]))

    def _find_id(self, mark: str) -> int | None:
        """Return the id of a mark that is one token."""
        ids = self._tokenizer.encode(mark)
        return ids[0] if len(ids) == 1 else None
