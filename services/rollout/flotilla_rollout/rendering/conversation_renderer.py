"""Conversations as sequences of tokens: token in, token out, as in an episode.

The first prompt is the dialect's own. Each turn's tokens stay as they are sampled, and a tool's
answer is appended to them, exactly as the rollout does. Where a user speaks, which no environment
does, the conversation is rendered again. If the template then shows earlier turns otherwise, for
instance without their thinking, a new sequence begins: its prompt is what the policy would read
there, and trains none of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import msgspec
import numpy as np

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.episodes.conversations import Conversation, SaidReply, SaidTurn
from flotilla_common.episodes.demonstrations import Demonstration
from flotilla_rollout.dialects.turns import (
    NO_CALL,
    OK,
    PARSE_ERROR,
    ParseError,
    PlayedTurn,
    Reply,
    ToolCall,
)
from flotilla_rollout.ports import Dialect
from flotilla_rollout.rendering.turn_writer import TurnWriter, WrittenTurn
from flotilla_rollout.tokenizer_port import TemplateError, Tokenizer
from flotilla_rollout.types import PromptFacts, Tool

_MOST_TOOLBOXES = 64


class NotRenderedError(Exception):
    """A conversation cannot be rendered at all; `fate` is the name under which it is counted."""

    def __init__(self, fate: str, message: str) -> None:
        super().__init__(message)
        self.fate = fate


@dataclass(slots=True)
class _Tokens:
    """A sequence in the making, and for each token whether it is trained."""

    ids: list[int]
    trained: list[bool] = field(default_factory=list[bool])

    def __post_init__(self) -> None:
        self.trained = [False] * len(self.ids)

    def add(self, ids: Sequence[int], *, trained: bool = False) -> None:
        self.ids += ids
        self.trained += [trained] * len(ids)


@dataclass(frozen=True, slots=True)
class Rendered:
    """The sequences of a conversation, and the faults of turns that are not trained, by number."""

    sequences: list[Demonstration]
    faults: dict[int, str]


class ConversationRenderer:
    """Renders conversations by one dialect."""

    def __init__(self, tokenizer: Tokenizer, dialect: Dialect) -> None:
        self._dialect = dialect
        self._writer = TurnWriter(tokenizer, dialect)
        # One object for one toolbox: dialects keep what they have made of it.
        self._tools_of = lru_cache(_MOST_TOOLBOXES)(_read_tools)

    def render(self, conversation: Conversation) -> Rendered:
        """Return the sequences of a conversation. Raises NotRenderedError."""
        tools = self._tools_of(msgspec.json.encode(conversation.tools))
        _check_calls(conversation, tools)
        faults: dict[int, str] = {}
        try:
            made = list(self._play(conversation, tools, faults))
        except TemplateError as error:
            raise NotRenderedError("not_rendered", str(error)) from error
        return Rendered([_to_demonstration(conversation, each) for each in made], faults)

    def _play(
        self, conversation: Conversation, tools: tuple[Tool, ...], faults: dict[int, str]
    ) -> Iterator[_Tokens]:
        facts = PromptFacts(conversation.prompt, "", {}, system=conversation.system)
        tokens = _Tokens(self._dialect.prompt_ids(facts, tools))
        played: list[PlayedTurn] = []
        last = len(conversation.turns) - 1
        for number, said in enumerate(conversation.turns):
            before, turn = np.array(tokens.ids, np.int32), _to_turn(said)
            written = self._writer.write(before, turn, tools, ends=number == last)
            if said.trained and written.fault:
                faults[number] = written.fault
            tokens.add(written.token_ids, trained=said.trained and not written.fault)
            if number == last:
                break
            turn = _with_replies(turn, said.replies, written)
            played.append(turn)
            if not turn.user:
                ids = written.token_ids
                tokens.add(self._dialect.bridge_ids(before, ids, turn.replies, tools))
                continue
            whole = self._dialect.render_turns(facts, tools, played)
            if whole[: len(tokens.ids)] == tokens.ids:
                tokens.add(whole[len(tokens.ids) :])
            else:
                yield tokens
                tokens = _Tokens(whole)
        yield tokens


def _to_turn(said: SaidTurn) -> PlayedTurn:
    calls = [ToolCall(call.name, call.arguments) for call in said.calls]
    return PlayedTurn(calls, (), said.thinking, said.content, said.user)


def _with_replies(
    turn: PlayedTurn, replies: Sequence[SaidReply], written: WrittenTurn
) -> PlayedTurn:
    """Return a turn with its replies, which answer its calls as they are read: some families write
    ids that their answers repeat."""
    calls = iter(turn.calls if written.fault else written.read.items)
    answered: list[Reply] = []
    for reply in replies:
        if reply.outcome == NO_CALL:
            item = None
        else:
            item = ParseError(reply.text) if reply.outcome == PARSE_ERROR else next(calls)
        answered.append(Reply(item, reply.outcome or OK, [reply.text]))
    return replace(turn, replies=answered)


def _read_tools(text: bytes) -> tuple[Tool, ...]:
    functions = [each["function"] for each in msgspec.json.decode(text)]
    return tuple(Tool(each["name"], each["description"], each["parameters"]) for each in functions)


def _check_calls(conversation: Conversation, tools: Sequence[Tool]) -> None:
    offered = {tool.name for tool in tools}
    for number, turn in enumerate(conversation.turns):
        for call in turn.calls:
            if call.name not in offered:
                raise NotRenderedError(
                    "tools_not_offered",
                    f"turn {number + 1} calls {call.name!r}, which its tools do not have",
                )


def _to_demonstration(conversation: Conversation, tokens: _Tokens) -> Demonstration:
    return Demonstration(
        *(conversation.source, AttemptKey(*conversation.key), conversation.task_key),
        conversation.reward,
        *(np.array(tokens.ids, np.int32), np.array(tokens.trained, np.bool_)),
    )
