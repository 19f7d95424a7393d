"""The dialect that explains everything in a system message, for models trained without tools."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_rollout.dialects.inert_text import InertText
from flotilla_rollout.dialects.reply_messages import ShownReply, make_reply_messages
from flotilla_rollout.dialects.tagged_calls import CALL_END, CALL_START, LENIENT, parse_turn
from flotilla_rollout.dialects.template import find_stop_ids, join_turn, strip_stop
from flotilla_rollout.dialects.template_turns import TemplateTurns, make_call_id
from flotilla_rollout.dialects.thinking import ThinkingMarks
from flotilla_rollout.dialects.tool_reply_text import make_turn_message, make_user_message
from flotilla_rollout.dialects.turns import (
    OK,
    PlayedTurn,
    Reply,
    ToolCall,
    Turn,
    total_reading,
)
from flotilla_rollout.tokenizer_port import Tokenizer
from flotilla_rollout.types import PromptFacts, Tool

NO_CALL = (
    'No tool call found. Use <tool_call>{"name": "...", "arguments": {...}}</tool_call> format.'
)


class FullDialect:
    """Dialect of any chat template: tools in a system message, replies as a user's, with pictures
    if `pad` names the token that stands for one.

    Raises TemplateError if the template rewrites earlier turns, does not end a turn with a control
    token, or cannot render a user's message after a turn.
    """

    template_shows_tools = False

    def __init__(
        self, tokenizer: Tokenizer, extra_stop_ids: Iterable[int] = (), pad: str = ""
    ) -> None:
        self._tokenizer = tokenizer
        self._inert = InertText(tokenizer.structure_tokens)
        self._turns = TemplateTurns(tokenizer, "user", self._inert, pad)
        self.thinking = ThinkingMarks(
            tokenizer, self._turns.first_turn(), self._turns.shown_thinking
        )
        self.stop_ids = find_stop_ids(tokenizer, self._turns, extra_stop_ids)

    def prompt_ids(self, facts: PromptFacts, tools: Sequence[Tool]) -> list[int]:
        messages = self._messages(facts, tools)
        return self._tokenizer.encode(self._tokenizer.apply_chat_template(messages, None, True))

    def bridge_ids(
        self,
        prompt_ids: NDArray[np.int32],
        completion_ids: Sequence[int],
        replies: Sequence[Reply],
        tools: Sequence[Tool],
    ) -> list[int]:
        tail = self._turns.after_turn(self._join_replies(replies))
        return join_turn(self._tokenizer, completion_ids, tail)

    @total_reading
    def parse_turn(
        self,
        prompt_ids: NDArray[np.int32],
        completion_ids: Sequence[int],
        tools: Sequence[Tool],
    ) -> Turn:
        ids, _ = strip_stop(completion_ids, self.stop_ids)
        opened = self.thinking.is_open
        text = self._tokenizer.decode(ids)
        turn = parse_turn(text, tools, thinking=opened, grammar=LENIENT)
        thinking = self.thinking.count_tokens(ids)
        return Turn(turn.items, turn.done, turn.answer, thinking)

    def render_turns(
        self, facts: PromptFacts, tools: Sequence[Tool], turns: Sequence[PlayedTurn]
    ) -> list[int]:
        messages = self._messages(facts, tools)
        marks = self.thinking if self._turns.puts_thinking_inline(turns) else None
        for turn in turns:
            spoken = "\n".join(filter(None, [turn.said, *map(write_call, turn.calls)]))
            messages.append(make_turn_message(spoken, turn.thought, marks))
            shown = self._join_replies(turn.replies)
            if turn.user:
                said = self._inert.clean_text(turn.user)
                shown.append(ShownReply("", "", f"\n\n{said}" if shown else said))
            if shown:
                messages += make_reply_messages(shown, "user")
        text = self._tokenizer.apply_chat_template(messages, None, turns[-1].is_answered)
        return self._tokenizer.encode(self._turns.without_closing(text))

    def _messages(self, facts: PromptFacts, tools: Sequence[Tool]) -> list[dict[str, Any]]:
        user = make_user_message(facts, self._inert)
        # Its own text names tokens such as `<tool_call>`.
        own = system_text(self._inert.tool_schemas(tools)) if tools else ""
        system = "\n\n".join(filter(None, [own, self._inert.clean_text(facts.system)]))
        return [*([{"role": "system", "content": system}] if system else []), user]

    def _join_replies(self, replies: Sequence[Reply]) -> list[ShownReply]:
        """Join replies into one text, or as many as have pictures after them. They are one message:
        some templates refuse two of a user in a row."""
        shown, text = list[ShownReply](), ""
        for number, each in enumerate(replies):
            clean = replace(each, parts=[self._inert.clean_text(each.text), *each.pictures])
            text += ("\n\n" if number else "") + self.reply_text(clean)
            if each.pictures or number == len(replies) - 1:
                call_id = make_call_id(len(shown))
                shown.append(ShownReply("", call_id, text, len(each.pictures)))
                text = ""
        return shown

    def reply_text(self, reply: Reply) -> str:
        if reply.item is None:
            return NO_CALL
        if reply.outcome == OK:
            return f"Tool result:\n{reply.text or ('' if reply.pictures else '(empty)')}"
        return f"Error: {reply.text or reply.outcome}"


def write_call(call: ToolCall) -> str:
    """Write a call in the form that the system message describes."""
    body = f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments_json}}}'
    return f"{CALL_START}{body}{CALL_END}"


def system_text(schemas: Sequence[Mapping[str, Any]]) -> str:
    """Return the system message, which explains tools and turns."""
    names = [str(schema["function"]["name"]) for schema in schemas]
    sections = [
        "You are a helpful agent. Complete the task by calling tools.",
        "## Available Tools\n" + json.dumps(list(schemas), indent=2, ensure_ascii=False),
        "## Tool Call Format\n"
        f"Use the tools listed above by name ({', '.join(names)}):\n"
        '<tool_call>{"name": "<tool_name_from_above>", "arguments": {...}}</tool_call>\n'
        "Several calls in one response are executed in order.",
        "## Error Handling\n"
        "When a tool call fails, read the error. Do not repeat the same call with identical "
        "arguments; change your approach.",
        "## Response Format\n"
        "Every response must end with a tool call or with <done>. When the task is finished, "
        "write the final answer first, then <done>. Never answer with only a message, and never "
        "ask whether there is anything else to do.",
    ]
    return "\n\n".join(sections)
