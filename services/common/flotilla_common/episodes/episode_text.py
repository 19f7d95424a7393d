"""A trajectory in readable form: runs of tokens by author, messages with their tool calls, turns.

    episode = read_episode(trajectory, decode)
    for message in episode.messages:
        print(message.role, message.content, [call.name for call in message.calls])

The policy's own tokenizer decodes the texts, special tokens included, and they stay raw in `runs`.
The rollout recorded the messages (see `common/domain/messages`); a sequence without any is shown by
its authors. Texts come from an episode and may be hostile: no code here trusts them."""

import json
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from flotilla_common.domain.attempts import ToolOutcome
from flotilla_common.domain.messages import (
    ChatCall,
    ChatMessage,
    ChatRole,
    MessageText,
    TokenText,
    decode_messages,
    shorten_message,
)
from flotilla_common.domain.token_authors import TURN_AUTHORS, Author, Span
from flotilla_common.domain.trajectory import Sequence, Trajectory, TurnTiming
from flotilla_common.text.parsing import TextLimits, parse_json

# Of the arguments of a call.
_LIMITS = TextLimits(bytes=2**22, values=2**18)
# Maps token ids to text, special tokens included.
Decode = Callable[[Items[int]], str]


def write_pictures_once(decode: Decode, picture_ids: Collection[int]) -> Decode:
    """Return `decode` with one token for each picture, as chat templates write it, in place of the
    hundreds that stand for it."""
    if not picture_ids:
        return decode

    def decode_once(ids: Items[int]) -> str:
        before = [-1, *ids[:-1]]
        pairs = zip(ids, before, strict=False)
        return decode([each for each, last in pairs if each != last or each not in picture_ids])

    return decode_once


# Roles of runs whose messages are unknown.
_ROLES: dict[Author, ChatRole] = {
    Author.PROMPT: "user",
    Author.POLICY: "assistant",
    Author.ENVIRONMENT: "tool",
}


@dataclass(frozen=True, slots=True)
class TextRun:
    """Tokens [start, end) of a sequence: the prompt, a turn of the policy including forced tokens,
    or the environment's output after one; `text` is raw."""

    author: Author
    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class EpisodeCall:
    """A call that a policy made; `arguments` are text if they are not a JSON object."""

    call_id: str
    name: str
    arguments: dict[str, Any] | str


@dataclass(frozen=True, slots=True)
class EpisodeMessage:
    """A message of the conversation.

    `run` is the run that holds its end. A tool's message has the `name` and `call_id` of the call
    that it answers, and its `outcome`. `media` are indices into the sequence's media."""

    role: ChatRole
    content: str
    run: int
    thinking: str = ""
    calls: tuple[EpisodeCall, ...] = ()
    name: str = ""
    call_id: str = ""
    outcome: str = ""
    media: tuple[int, ...] = ()
    by_template: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return it in the format of chat templates and of OpenAI's API."""
        row: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.thinking:
            row["reasoning_content"] = self.thinking
        if self.calls:
            row["tool_calls"] = [_call_to_json(call) for call in self.calls]
        if self.role == "tool":
            row |= {"tool_call_id": self.call_id, "name": self.name}
            if self.outcome != ToolOutcome.OK:
                row["outcome"] = self.outcome
        if self.by_template:
            row["by_template"] = True
        return row


@dataclass(frozen=True, slots=True)
class EpisodeTurn:
    """A turn of the policy: its number from 1 in the attempt, its run and message in the sequence,
    and its times, if known."""

    number: int
    run: int
    message: int
    timing: TurnTiming | None


@dataclass(frozen=True, slots=True)
class SequenceText:
    """One sequence of an attempt."""

    runs: tuple[TextRun, ...]
    messages: tuple[EpisodeMessage, ...]
    turns: tuple[EpisodeTurn, ...]


@dataclass(frozen=True, slots=True)
class EpisodeText:
    """All sequences of an attempt."""

    sequences: tuple[SequenceText, ...]

    @property
    def messages(self) -> tuple[EpisodeMessage, ...]:
        """The final conversation; empty if no tokens are kept."""
        return self.sequences[-1].messages if self.sequences else ()

    @property
    def prompt(self) -> str:
        """Raw text of the first prompt."""
        runs = self.sequences[0].runs if self.sequences else ()
        return runs[0].text if runs and runs[0].author is Author.PROMPT else ""

    @property
    def response(self) -> str:
        """Raw text of everything after the first prompt; for later sequences, after theirs."""
        runs = [run for each in self.sequences for run in each.runs]
        return "".join(run.text for run in runs if run.author is not Author.PROMPT)


def read_episode(trajectory: Trajectory, decode: Decode) -> EpisodeText:
    """Read an attempt. Raises MessagesError for messages that no learner accepts."""
    found = list[SequenceText]()
    played = 0
    told = told_messages(trajectory)
    for sequence, messages in zip(trajectory.sequences, told, strict=True):
        text = _read_sequence(sequence, messages, decode, trajectory.turns[played:], played)
        played += len(text.turns)
        found.append(text)
    return EpisodeText(tuple(found))


def told_messages(trajectory: Trajectory) -> list[tuple[ChatMessage, ...]]:
    """Return the messages of each sequence, those that it shares with its parent included.

    Where none were recorded, there is one for each run of an author. Raises MessagesError for
    messages that no learner accepts."""
    found = list[tuple[ChatMessage, ...]]()
    for sequence in trajectory.sequences:
        before, shared, origin = list[ChatMessage](), sequence.shared, sequence.origin
        parent = origin.parent if origin else None
        for message in () if parent is None else found[parent]:
            if before and before[-1].end >= shared:
                break
            before.append(shorten_message(message, shared))
        found.append((*before, *(decode_messages(sequence.messages) or _by_authors(sequence))))
    return found


def _by_authors(sequence: Sequence) -> list[ChatMessage]:
    """Return a message for each run of the sequence's own tokens."""
    found, shared = list[ChatMessage](), sequence.shared
    for author, start, end in _find_runs(sequence):
        if end > shared:
            content = TokenText(max(start, shared), end)
            media = [item.sha256 for item in sequence.media if start <= item.token_offset < end]
            found.append(ChatMessage(_ROLES[author], end, content, media=tuple(media)))
    return found


def _read_sequence(
    sequence: Sequence,
    told: Items[ChatMessage],
    decode: Decode,
    timings: Items[TurnTiming],
    played: int,
) -> SequenceText:
    decode = write_pictures_once(decode, sequence.picture_ids)
    runs, token_ids = tuple(_read_runs(sequence, decode)), sequence.token_ids.tolist()
    places = {item.sha256: place for place, item in enumerate(sequence.media)}

    def text_of(text: MessageText) -> str:
        return text if isinstance(text, str) else text.read(token_ids, decode)

    messages, turns, at = list[EpisodeMessage](), list[EpisodeTurn](), 0
    # Names of the calls, by id; a policy may use its own ids again.
    called = dict[str, str]()
    for message in told:
        called |= {call.id: call.name for call in message.calls}
        while at + 1 < len(runs) and message.end > runs[at].end:
            at += 1
        if message.role == "assistant" and runs[at].author is Author.POLICY:
            timing = timings[len(turns)] if len(turns) < len(timings) else None
            turns.append(EpisodeTurn(played + len(turns) + 1, at, len(messages), timing))
        messages.append(
            EpisodeMessage(
                message.role,
                text_of(message.content),
                at,
                text_of(message.thinking),
                tuple(
                    EpisodeCall(each.id, each.name, _read_arguments(each)) for each in message.calls
                ),
                message.name or called.get(message.call_id, ""),
                message.call_id,
                message.outcome or (ToolOutcome.OK if message.role == "tool" else ""),
                tuple(places[each] for each in message.media if each in places),
                message.by_template,
            )
        )
    return SequenceText(runs, tuple(messages), tuple(turns))


def _read_runs(sequence: Sequence, decode: Decode) -> Iterator[TextRun]:
    for author, start, end in _find_runs(sequence):
        yield TextRun(author, start, end, decode(sequence.token_ids[start:end].tolist()))


def _find_runs(sequence: Sequence) -> Iterator[tuple[Author, int, int]]:
    """Yield the runs of tokens by author; forced tokens are a part of the policy's."""
    start = 0
    for author, spans in groupby(sequence.spans, key=_run_author):
        end = start + sum(span.length for span in spans)
        yield author, start, end
        start = end


def _run_author(span: Span) -> Author:
    return Author.POLICY if span.author in TURN_AUTHORS else span.author


def _read_arguments(call: ChatCall) -> dict[str, Any] | str:
    try:
        value = parse_json(call.arguments, _LIMITS, strict=True)
        # Halves of characters, which no file can hold.
        json.dumps(value, ensure_ascii=False).encode()
    except ValueError:
        return call.arguments
    return value if isinstance(value, dict) else call.arguments


def _call_to_json(call: EpisodeCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}
