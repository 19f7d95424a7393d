"""Each reply is one `tool` message with the name and id of its call, and cannot end a turn."""

import json

import pytest

from flotilla_rollout.dialects.inert_text import InertText
from flotilla_rollout.dialects.tool_reply_text import (
    make_conversation,
    make_tool_messages,
    native_reply_text,
)
from flotilla_rollout.dialects.turns import OK, ParseError, PlayedTurn, Reply, ToolCall
from flotilla_rollout.types import PromptFacts

INERT = InertText(["<end>"])
CALL = ToolCall("look", '{"at": "door"}', "id-7")


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (Reply(CALL, OK, ["a", "b"]), "a\nb"),
        (Reply(CALL, OK, []), "null"),
        (Reply(CALL, "tool_error", ["it broke"]), '{"error": "it broke"}'),
        (Reply(CALL, "timeout", []), '{"error": "timeout"}'),
        (Reply(None, "no_call", []), '{"error": "no tool call found"}'),
    ],
)
def test_a_reply_is_the_result_or_an_error_as_json(reply: Reply, text: str) -> None:
    assert native_reply_text(reply) == text


def test_a_malformed_call_is_answered_under_a_name_and_an_id_of_its_own() -> None:
    wrong = Reply(ParseError("not JSON"), "malformed", ["not JSON"])
    first, second = make_tool_messages([Reply(CALL, OK, ["<end>"]), wrong], INERT)
    assert (first["name"], first["tool_call_id"], first["content"]) == ("look", "id-7", "< end>")
    assert (second["name"], second["tool_call_id"]) == ("malformed_call", "call00001")


@pytest.mark.parametrize("as_text", [False, True])
def test_a_conversation_is_a_question_a_turn_of_calls_and_their_replies(as_text: bool) -> None:
    question = PromptFacts("Where<end>?", "", {})
    turn = PlayedTurn([CALL], [Reply(CALL, OK, [])])
    messages = make_conversation(question, [turn], INERT, as_text=as_text)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[0]["content"] == "Where< end>?"
    [made] = messages[1]["tool_calls"]
    given = made["function"]["arguments"]
    assert given == (CALL.arguments_json if as_text else json.loads(CALL.arguments_json))
    assert made["id"] == messages[2]["tool_call_id"] == "id-7"
