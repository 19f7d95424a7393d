"""A trajectory in readable form: runs of tokens by author, messages with their tool calls, turns.

    episode = read_episode(trajectory, decode)
    for message in episode.messages:
        print(message.role, message.content, [call.name for call in message.calls])

The policy's own tokenizer decodes the texts, special tokens included, and they stay raw in `runs`;
messages are parsed from them on a best-effort basis (see `assistant_text`, `chat_markup`). Texts
come from an episode and may be hostile: no code here trusts them."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from services.common.domain.trajectory import Author, Sequence, Span, Trajectory, TurnTiming
from services.common.episodes.assistant_text import AssistantText, EpisodeCall, read_assistant
from services.common.episodes.chat_markup import (
    Role,
    open_role,
    split_marked,
    split_replies,
    strip_turn,
)

# Maps token ids to text, special tokens included.
Decode = Callable[[Items[int]], str]
# Authors of the tokens of one turn.
_TURN_AUTHORS = (Author.POLICY, Author.FORCED)


@dataclass(frozen=True, slots=True)
class TextRun:
    """Tokens [start, end) of a sequence: the prompt, a turn of the policy including forced tokens,
    or the environment's output after one; `text` is raw."""

    author: Author
    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class EpisodeMessage:
    """A message of the conversation.

    `run` is the run that holds it. A tool's message has the `name` and `call_id` of the call that
    it answers, if known. `media` are indices into the sequence's media."""

    role: Role
    content: str
    run: int
    thinking: str = ""
    calls: tuple[EpisodeCall, ...] = ()
    name: str = ""
    call_id: str = ""
    media: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it in the format of chat templates and of OpenAI's API."""
        row: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.thinking:
            row["reasoning_content"] = self.thinking
        if self.calls:
            row["tool_calls"] = [_call_to_json(call) for call in self.calls]
        if self.role == "tool":
            row |= {"tool_call_id": self.call_id, "name": self.name}
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
    """All sequences of an attempt. There are several if the conversation was rendered again: each
    later one repeats the earlier content."""

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
    """Read an attempt. Total: any sampled text can be read."""
    found = list[SequenceText]()
    played = 0
    for sequence in trajectory.sequences:
        text = _SequenceReader(sequence, decode, played, trajectory.turns).read()
        played += len(text.turns)
        found.append(text)
    return EpisodeText(tuple(found))


class _SequenceReader:
    """One pass through the runs of a sequence."""

    def __init__(
        self, sequence: Sequence, decode: Decode, played: int, timings: Items[TurnTiming]
    ) -> None:
        self._sequence = sequence
        self._runs = tuple(_read_runs(sequence, decode))
        self._played = played
        self._timings = timings
        self._messages: list[EpisodeMessage] = []
        self._turns: list[EpisodeTurn] = []
        # Calls without an answer yet.
        self._waiting: list[EpisodeCall] = []
        self._role: Role | None = None
        self._thinking_open = False

    def read(self) -> SequenceText:
        for number, run in enumerate(self._runs):
            if run.author in _TURN_AUTHORS:
                self._read_turn(number, run)
            else:
                self._read_markup(number, run)
        return SequenceText(self._runs, tuple(self._messages), tuple(self._turns))

    def _read_turn(self, number: int, run: TextRun) -> None:
        turn = read_assistant(strip_turn(run.text), thinking_open=self._thinking_open)
        self._role, self._thinking_open = open_role(run.text), False
        self._add_assistant(number, turn)
        played = self._played + len(self._turns)
        timing = self._timings[played] if played < len(self._timings) else None
        self._turns.append(EpisodeTurn(played + 1, number, len(self._messages) - 1, timing))

    def _read_markup(self, number: int, run: TextRun) -> None:
        """Read a prompt or an environment's output; its end may open the next turn."""
        pieces = split_marked(run.text, self._role)
        self._role = None
        media = self._media_of(run)
        if pieces and pieces[-1].role == "assistant":
            opened = pieces[-1].text.rstrip()
            self._thinking_open = opened.endswith(("<think>", "<seed:think>", "[THINK]"))
            if self._thinking_open or not opened or opened.endswith("</think>"):
                pieces.pop()
        before = len(self._messages)
        for piece in pieces:
            # Some templates write the system's text without a mark.
            unmarked: Role = "system" if number == 0 and len(pieces) > 1 else "user"
            role = piece.role or ("tool" if self._waiting else unmarked)
            self._add_piece(number, role, piece.text)
        if media and len(self._messages) > before:
            self._messages[-1] = replace(self._messages[-1], media=media)

    def _add_piece(self, number: int, role: Role, text: str) -> None:
        if role == "assistant":
            self._add_assistant(number, read_assistant(text))
            return
        replies = split_replies(text, len(self._waiting)) if role in ("user", "tool") else None
        if replies is None and role == "tool":
            replies = [text]
        if replies is None:
            self._messages.append(EpisodeMessage(role, text, number))
        for reply in replies or ():
            self._add_reply(number, reply)

    def _add_reply(self, number: int, text: str) -> None:
        call = self._waiting.pop(0) if self._waiting else None
        name, call_id = (call.name, call.call_id) if call else ("", "")
        self._messages.append(EpisodeMessage("tool", text, number, name=name, call_id=call_id))

    def _add_assistant(self, number: int, turn: AssistantText) -> None:
        place = len(self._messages)
        calls = tuple(
            replace(call, call_id=call.call_id or f"call_{place}_{index}")
            for index, call in enumerate(turn.calls)
        )
        self._waiting = list(calls)
        self._messages.append(
            EpisodeMessage("assistant", turn.content, number, turn.thinking, calls)
        )

    def _media_of(self, run: TextRun) -> tuple[int, ...]:
        media = enumerate(self._sequence.media)
        return tuple(i for i, each in media if run.start <= each.token_offset < run.end)


def _read_runs(sequence: Sequence, decode: Decode) -> Iterator[TextRun]:
    start = 0
    for author, spans in groupby(sequence.spans, key=_run_author):
        end = start + sum(span.length for span in spans)
        yield TextRun(author, start, end, decode(sequence.token_ids[start:end].tolist()))
        start = end


def _run_author(span: Span) -> Author:
    return Author.POLICY if span.author in _TURN_AUTHORS else span.author


def _call_to_json(call: EpisodeCall) -> dict[str, Any]:
    arguments = call.arguments if call.arguments is not None else call.arguments_text
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.call_id, "type": "function", "function": function}
