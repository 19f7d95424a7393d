"""Replies of tools in native `tool` messages: a result, an error, a malformed call, or no call at
all. `full.py` has its own wording for them."""

import json
from collections.abc import Sequence
from typing import Any

from flotilla_rollout.dialects.inert_text import InertText
from flotilla_rollout.dialects.reply_messages import (
    ShownReply,
    make_content,
    make_reply_messages,
)
from flotilla_rollout.dialects.template_turns import THINKING_FIELD, make_call_id
from flotilla_rollout.dialects.thinking import ThinkingMarks
from flotilla_rollout.dialects.turns import OK, PlayedTurn, Reply, ToolCall
from flotilla_rollout.types import PromptFacts

# Name in the answer to a malformed call, which may have none.
MALFORMED = "malformed_call"
NO_CALL = {"error": "no tool call found"}


def native_reply_text(reply: Reply) -> str:
    """Return the content of a `tool` message: the tool's answer, or an error as JSON."""
    if reply.item is None:
        return json.dumps(NO_CALL)
    if reply.outcome == OK:
        return reply.text or ("" if reply.pictures else "null")
    return json.dumps({"error": reply.text or reply.outcome})


def show_tool_replies(replies: Sequence[Reply], inert: InertText) -> list[ShownReply]:
    """Return replies as `tool` messages show them, each with the name and id of its call."""
    shown: list[ShownReply] = []
    for number, reply in enumerate(replies):
        call = reply.item if isinstance(reply.item, ToolCall) else ToolCall(MALFORMED, "{}")
        shown.append(
            ShownReply(
                inert.clean_text(call.name),
                inert.clean_text(call.call_id) or make_call_id(number),
                inert.clean_text(native_reply_text(reply)),
                len(reply.pictures),
            )
        )
    return shown


def make_tool_messages(
    replies: Sequence[Reply], inert: InertText, *, apart: bool = False
) -> list[dict[str, Any]]:
    """Return replies as `tool` messages, with their pictures in them or `apart`."""
    return make_reply_messages(show_tool_replies(replies, inert), "tool", apart=apart)


def make_user_message(facts: PromptFacts, inert: InertText) -> dict[str, Any]:
    """Return the message of a task, with the pictures of the first observation."""
    content = make_content([(inert.clean_text(facts.task), len(facts.pictures))])
    return {"role": "user", "content": content}


def make_conversation(
    facts: PromptFacts,
    turns: Sequence[PlayedTurn],
    inert: InertText,
    marks: ThinkingMarks | None = None,
    *,
    as_text: bool = False,
    apart: bool = False,
) -> list[dict[str, Any]]:
    """Return the messages of a question, and of turns with calls and the replies to them, whose
    pictures are in their messages or `apart`.

    With `marks` a thinking is part of the content, between the marks."""
    messages = [make_user_message(facts, inert)]
    if facts.system:
        messages.insert(0, {"role": "system", "content": inert.clean_text(facts.system)})
    for turn in turns:
        shown = [_show_call(call, number, as_text) for number, call in enumerate(turn.calls)]
        message = make_turn_message(turn.said, turn.thought, marks)
        # Some templates take an empty list of calls for a call.
        messages.append({**message, "tool_calls": shown} if shown else message)
        messages += make_tool_messages(turn.replies, inert, apart=apart)
        if turn.user:
            messages.append({"role": "user", "content": inert.clean_text(turn.user)})
    return messages


def make_turn_message(content: str, thought: str, marks: ThinkingMarks | None) -> dict[str, Any]:
    """Return the message of a turn."""
    if marks is not None and thought:
        return {"role": "assistant", "content": marks.wrap(thought) + content}
    field = {THINKING_FIELD: thought} if thought else {}
    return {"role": "assistant", "content": content, **field}


def _show_call(call: ToolCall, number: int, as_text: bool) -> dict[str, Any]:
    arguments = call.arguments_json if as_text else json.loads(call.arguments_json)
    return {
        "id": call.call_id or make_call_id(number),
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }
