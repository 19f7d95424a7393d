"""One parsed policy turn, and the replies to its calls."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

OK = "ok"
# Outcome of a turn without a call.
NO_CALL = "no_call"
DONE = "<done>"
# The turn that finishes an attempt: one without a call, or one with `<done>`.
Finish = Literal["answer", "done"]
# The thinking of earlier turns that the policy keeps reading: all of it, or the part that its own
# template shows within one cycle of calls and answers.
Retention = Literal["all", "tool_cycle"]
PARSE_ERROR = "parse_error"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A well-formed call. `arguments_json` is a JSON object; `call_id` is the policy's, if any."""

    name: str
    arguments_json: str
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class ParseError:
    """A malformed call; the policy reads the message."""

    message: str


@dataclass(frozen=True, slots=True)
class Turn:
    """Content of one policy turn.

    `answer` is its text without thinking and calls. `done` is True if the policy declares that it
    has finished. Its first `thinking_tokens` tokens are thinking, marks included.
    """

    items: tuple[ToolCall | ParseError, ...]
    done: bool
    answer: str
    thinking_tokens: int = 0

    @property
    def has_call(self) -> bool:
        return any(isinstance(item, ToolCall) for item in self.items)


def decide_end(turn: Turn, *, ended: bool, finish: Finish) -> Turn:
    """Return the turn with `done` set by `finish`; `ended` is True if the policy ended the turn."""
    declared = turn.done or DONE in turn.answer
    done = declared if finish == "done" else declared or (ended and not turn.items)
    return replace(turn, done=done, answer=turn.answer.replace(DONE, "").strip())


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer to one item of a turn; `outcome` is "ok" or a kind of error.

    Without an `item` it answers a turn without a call."""

    item: ToolCall | ParseError | None
    outcome: str
    parts: Sequence[str]

    @property
    def text(self) -> str:
        return "\n".join(self.parts)


@dataclass(frozen=True, slots=True)
class PlayedTurn:
    """A turn of a conversation rendered at once: thinking, calls, and replies to them."""

    calls: Sequence[ToolCall]
    replies: Sequence[Reply] = ()
    thought: str = ""
