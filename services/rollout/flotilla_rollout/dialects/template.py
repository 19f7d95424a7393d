"""The dialect of a model's own chat template: native roles, tool schemas and calls."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from flotilla_rollout.dialects.call_proof import CallProof
from flotilla_rollout.dialects.call_readers import MakeReader, SampledTurn, TaggedCallReader
from flotilla_rollout.dialects.inert_text import InertText
from flotilla_rollout.dialects.reply_messages import ShownReply
from flotilla_rollout.dialects.template_turns import TemplateTurns, advise_full, make_call_id
from flotilla_rollout.dialects.thinking import ThinkingForm, ThinkingMarks
from flotilla_rollout.dialects.tool_reply_text import (
    make_conversation,
    native_reply_text,
    show_tool_replies,
)
from flotilla_rollout.dialects.turns import (
    Finish,
    PlayedTurn,
    Reply,
    Turn,
    decide_end,
    total_reading,
)
from flotilla_rollout.tokenizer_port import TemplateError, Tokenizer
from flotilla_rollout.types import PromptFacts, Tool


class TemplateDialect:
    """Dialect of one chat template, whose calls are read by `reader`; `thinking` are the marks
    around a thinking, and `finish` determines the last turn. With `pad`, the token that stands for
    a picture, it shows pictures.

    Raises TemplateError if the template rewrites earlier turns, does not end a turn with a control
    token, or cannot render tools' answers.
    """

    template_shows_tools = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        reader: MakeReader = TaggedCallReader,
        extra_stop_ids: Iterable[int] = (),
        thinking: ThinkingForm = ThinkingForm(),  # noqa: B008 - it is frozen
        finish: Finish = "answer",
        pad: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._finish: Finish = finish
        self._inert = InertText(tokenizer.structure_tokens)
        try:
            self._turns = TemplateTurns(tokenizer, "tool", self._inert, pad)
        except TemplateError as error:
            raise advise_full(tokenizer, error, pad) from error
        turns = self._turns
        self.thinking = ThinkingMarks(tokenizer, turns.first_turn(), turns.shown_thinking, thinking)
        proof = CallProof(turns.write_calls, tokenizer.structure_tokens, end=turns.sample_end)
        self._reader = reader(tokenizer, proof)
        self.stop_ids = find_stop_ids(tokenizer, self._turns, extra_stop_ids)

    def prompt_ids(self, facts: PromptFacts, tools: Sequence[Tool]) -> list[int]:
        prompt = render_conversation(self._tokenizer, facts, tools, (), self._inert)
        return self._tokenizer.encode(prompt)

    def bridge_ids(
        self,
        prompt_ids: NDArray[np.int32],
        completion_ids: Sequence[int],
        replies: Sequence[Reply],
        tools: Sequence[Tool],
    ) -> list[int]:
        shown = show_tool_replies(replies, self._inert)
        return join_turn(self._tokenizer, completion_ids, self._turns.after_turn(shown))

    @total_reading
    def parse_turn(
        self,
        prompt_ids: NDArray[np.int32],
        completion_ids: Sequence[int],
        tools: Sequence[Tool],
    ) -> Turn:
        ids, ended = strip_stop(completion_ids, self.stop_ids)
        thinking = self.thinking.count_tokens(ids)
        sampled = SampledTurn(ids, prompt_ids, thinking, self.thinking.is_open)
        turn = self._reader.read_turn(sampled, tools)
        turn = decide_end(turn, ended=ended, finish=self._finish)
        return replace(turn, thinking_tokens=thinking)

    def render_turns(
        self, facts: PromptFacts, tools: Sequence[Tool], turns: Sequence[PlayedTurn]
    ) -> list[int]:
        marks = self.thinking if self._turns.puts_thinking_inline(turns) else None
        apart = self._turns.pictures_apart
        text = render_conversation(
            self._tokenizer, facts, tools, turns, self._inert, marks, apart=apart
        )
        return self._tokenizer.encode(self._turns.without_closing(text))

    @property
    def shown_thinking(self) -> str:
        """A turn of THOUGHT and ANSWER in the template's form."""
        return self._turns.shown_thinking

    def reply_text(self, reply: Reply) -> str:
        return native_reply_text(reply)


def render_conversation(
    tokenizer: Tokenizer,
    facts: PromptFacts,
    tools: Sequence[Tool],
    turns: Sequence[PlayedTurn],
    inert: InertText,
    marks: ThinkingMarks | None = None,
    *,
    apart: bool = False,
) -> str:
    """Return a prompt and turns as the chat template renders them, with the start of the next turn
    where one follows. Raises TemplateError."""
    schemas, continues = inert.tool_schemas(tools), not turns or turns[-1].is_answered
    try:
        messages = make_conversation(facts, turns, inert, marks, apart=apart)
        return tokenizer.apply_chat_template(messages, schemas, continues)
    except TemplateError:
        if not turns:
            raise
        # Some templates expect arguments as text.
        messages = make_conversation(facts, turns, inert, marks, as_text=True, apart=apart)
        return tokenizer.apply_chat_template(messages, schemas, continues)


def find_stop_ids(
    tokenizer: Tokenizer, turns: TemplateTurns, extra: Iterable[int]
) -> tuple[int, ...]:
    """Return the ids that end a turn: the template's own first, then those in `extra`."""
    end = tokenizer.encode(turns.after_turn([ShownReply("look", make_call_id(0), "")]))[:1]
    return tuple(dict.fromkeys([*end, *extra]))


def join_turn(tokenizer: Tokenizer, completion_ids: Sequence[int], tail: str) -> list[int]:
    """Return the ids of `tail` without its first if the policy has sampled that one itself."""
    ids = tokenizer.encode(tail)
    return ids[1:] if len(completion_ids) and completion_ids[-1] == ids[0] else ids


def strip_stop(
    completion_ids: Sequence[int], stop_ids: Sequence[int]
) -> tuple[Sequence[int], bool]:
    """Return the ids without the token that ended the turn, and whether there was one."""
    ended = bool(len(completion_ids)) and completion_ids[-1] in stop_ids
    return (completion_ids[:-1] if ended else completion_ids), ended
