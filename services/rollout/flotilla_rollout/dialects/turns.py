"""One parsed policy turn, and the replies to its calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Literal, ParamSpec

from flotilla_common.images.picture import Picture

P = ParamSpec("P")

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
# Characters of a reader's own error that the policy reads.
_MOST_QUOTED = 200


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


def total_reading(read: Callable[P, Turn]) -> Callable[P, Turn]:
    """Make the reading of a turn total: what a reader cannot read is an error that the policy
    reads.

    Otherwise its attempt would be aborted and played again until the policy writes something else,
    which biases the training data."""

    @wraps(read)
    def read_any(*args: P.args, **kwargs: P.kwargs) -> Turn:
        try:
            return read(*args, **kwargs)
        except RecursionError:
            problem = "tool call is nested too deeply"
        except Exception as error:  # noqa: BLE001
            # Renderers and parsers may raise any error.
            problem = f"a tool call could not be read: {error}"[:_MOST_QUOTED]
        return Turn((ParseError(problem),), False, "")

    return read_any


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
    parts: Sequence[str | Picture]

    @property
    def text(self) -> str:
        return "\n".join(part for part in self.parts if isinstance(part, str))

    @property
    def pictures(self) -> list[Picture]:
        """Pictures that the policy sees after the text, in order."""
        return [part for part in self.parts if isinstance(part, Picture)]


@dataclass(frozen=True, slots=True)
class PlayedTurn:
    """A turn of a conversation rendered at once: thinking, calls, and replies to them.

    `said` is its text beside the calls, and `user` what a user says after it, which environments
    never do."""

    calls: Sequence[ToolCall]
    replies: Sequence[Reply] = ()
    thought: str = ""
    said: str = ""
    user: str = ""

    @property
    def is_answered(self) -> bool:
        """True if the policy's next turn follows."""
        return bool(self.replies or self.user)
