"""Rows of conversation files: every common form becomes the same conversation, and what is in none
is named."""

import json
from typing import Any

import pytest

from flotilla_common.episodes.conversations import (
    NO_CALL,
    PARSE_ERROR,
    Conversation,
    SaidCall,
    SaidReply,
    SaidTurn,
)
from flotilla_reading.demonstrations.conversation_rows import (
    ConversationRowError,
    LeftOutError,
    read_row,
)

CALL = {"id": "a", "type": "function", "function": {"name": "find", "arguments": '{"x": 1}'}}
TOOL = {"name": "find", "description": "Finds.", "parameters": {"type": "object"}}
SAID: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Find it."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "7"},
    {"role": "assistant", "content": "It is 7."},
]
TURNS = (
    SaidTurn(calls=(SaidCall("find", '{"x": 1}'),), replies=(SaidReply("7"),)),
    SaidTurn("It is 7."),
)


def read(**row: Any) -> Conversation:
    found = read_row({"tools": [TOOL], **row}, "file", "line 1")
    assert found is not None
    return found


def read_messages(*messages: dict[str, Any]) -> Conversation:
    return read(messages=[{"role": "user", "content": "Go."}, *messages])


def test_messages_become_a_prompt_and_turns_with_their_answers() -> None:
    found = read(messages=SAID, key="t", reward=0.5)
    assert (found.system, found.prompt, found.turns) == ("Be brief.", "Find it.", TURNS)
    assert (found.key, found.task_key, found.reward) == (("line 1", 0, 0), "t", 0.5)
    assert found.tools == ({"type": "function", "function": TOOL},)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param({"messages": json.dumps(SAID)}, id="JSON text"),
        pytest.param({"prompt": SAID[:2], "completion": SAID[2:]}, id="prompt and completion"),
        pytest.param({"prompt": SAID[:4], "completion": SAID[4]}, id="one message as completion"),
        pytest.param(
            {
                "conversations": [
                    {"from": "system", "value": "Be brief."},
                    {"from": "human", "value": "Find it."},
                    {"from": "function_call", "value": '{"name": "find", "arguments": {"x": 1}}'},
                    {"from": "observation", "value": "7"},
                    {"from": "gpt", "value": "It is 7."},
                ]
            },
            id="ShareGPT",
        ),
        pytest.param({"messages": SAID, "tools": json.dumps([TOOL])}, id="tools as JSON text"),
        pytest.param(
            {"messages": [*SAID, {"role": "user", "content": "Thanks."}]}, id="a word at the end"
        ),
        pytest.param(
            {"messages": [{**each, "tool_calls": each.get("tool_calls")} for each in SAID]},
            id="empty fields",
        ),
        pytest.param({"messages": SAID, "reward": 1, "key": None}, id="a reward and no key"),
        pytest.param(
            {"messages": [{"role": "system", "content": "Tools: ...", "by_template": True}, *SAID]},
            id="what a template said by itself",
        ),
    ],
)
def test_every_form_is_the_same_conversation(row: dict[str, Any]) -> None:
    assert read(**row) == read(messages=SAID)


def test_texts_of_a_prompt_and_its_completion_are_a_question_and_an_answer() -> None:
    found = read(prompt="Find it.", completion="It is 7.")
    assert (found.prompt, found.turns) == ("Find it.", (SaidTurn("It is 7."),))


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning", "thinking"])
def test_the_thinking_of_a_turn_has_any_of_its_usual_names(field: str) -> None:
    found = read_messages({"role": "assistant", "content": "7", field: "Hm."})
    assert found.turns == (SaidTurn("7", "Hm."),)


def test_a_turn_of_weight_0_is_only_read() -> None:
    found = read_messages(
        {"role": "assistant", "content": "No.", "weight": 0},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes.", "weight": 1},
    )
    assert found.turns == (SaidTurn("No.", user="Sure?", trained=False), SaidTurn("Yes."))


def test_answers_go_to_their_calls_by_id_and_else_in_order() -> None:
    calls = [{**CALL, "id": name} for name in "ab"]
    answers = [{"role": "tool", "content": text, "tool_call_id": text} for text in "ba"]
    end = {"role": "assistant", "content": "Done."}
    by_id = read_messages({"role": "assistant", "tool_calls": calls}, *answers, end)
    assert [each.text for each in by_id.turns[0].replies] == ["a", "b"]
    unnamed = [{"role": "tool", "content": text} for text in "ba"]
    in_order = read_messages({"role": "assistant", "tool_calls": calls}, *unnamed, end)
    assert [each.text for each in in_order.turns[0].replies] == ["b", "a"]


def test_answers_to_no_call_are_those_of_a_recorded_episode() -> None:
    found = read_messages(
        {"role": "assistant", "content": "<tool_call>{", "tool_calls": [CALL]},
        {"role": "tool", "name": "malformed_call", "content": '{"error": "no JSON"}'}
        | {"outcome": PARSE_ERROR, "tool_call_id": "call_1_0"},
        {"role": "tool", "content": '{"error": "gone"}', "outcome": "tool_error"}
        | {"tool_call_id": "a"},
        {"role": "assistant", "content": "Hm."},
        {"role": "user", "content": "No tool call found.", "outcome": NO_CALL},
        {"role": "assistant", "content": "Done."},
    )
    first, second, _ = found.turns
    assert first.replies == (SaidReply("no JSON", PARSE_ERROR), SaidReply("gone", "tool_error"))
    assert second.replies == (SaidReply("No tool call found.", NO_CALL),) and not second.user


def test_rows_with_one_prompt_are_of_one_task_and_others_are_not() -> None:
    first, again = read(messages=SAID), read(messages=[*SAID[:2], SAID[4]])
    other = read(messages=[{"role": "user", "content": "Find another."}, SAID[4]])
    assert first.task_key == again.task_key != other.task_key


def test_a_row_without_a_grade_is_none() -> None:
    assert read_row({"messages": SAID, "reward": None}, "file", "line 1") is None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([], "expected an object"),
        ({"tools": []}, 'expected "messages", "conversations", or "prompt" and "completion"; '),
        ({"messages": SAID, "prompt": "x"}, 'expected "messages"'),
        ({"prompt": "x"}, 'expected "messages"'),
        (
            {"messages": SAID, "loss_mask": [], "id": 3},
            "unknown keys 'id', 'loss_mask': remove them, or name each with --ignore",
        ),
        ({"messages": [{"role": "robot"}]}, r"Invalid enum value 'robot' - at `\$.messages\[0\]"),
        (
            {"messages": [{"role": "user", "content": "x", "train": 1}]},
            r"unknown field `train` - at `\$.messages\[0\]`",
        ),
        ({"messages": [{"role": "user", "content": 3}]}, r"got `int` - at `\$.messages\[0\].cont"),
        ({"messages": "[{"}, "messages: expected JSON"),
        (
            {"messages": SAID, "tools": {"find": 1}},
            r"Expected `array`, got `object` - at `\$.tools",
        ),
        ({"messages": SAID, "tools": [{"function": {}}]}, "missing required field `name`"),
        ({"messages": SAID, "reward": "good"}, r"Expected `float \| null`, got `str`"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, "'robot' is none of system, human"),
        ({"conversations": [{"from": "human", "text": "x"}]}, "unknown keys 'text'"),
    ],
)
def test_what_is_no_conversation_is_named(row: Any, reason: str) -> None:
    with pytest.raises(ConversationRowError, match=reason):
        read_row(row, "file", "line 1")


def test_a_key_that_is_named_is_not_looked_at() -> None:
    assert read_row({"messages": SAID, "id": 3}, "file", "line 1", {"id"}) is not None


@pytest.mark.parametrize(
    "arguments", ["{", "[1]", '"x"', None, {}], ids=["cut", "list", "text", "none", "empty"]
)
def test_arguments_are_a_json_object_or_refused(arguments: Any) -> None:
    call = {"function": {"name": "find", "arguments": arguments}}
    message = {"role": "assistant", "tool_calls": [call]}
    if arguments:
        with pytest.raises(ConversationRowError, match="arguments"):
            read_messages(message)
        return
    assert read_messages(message).turns[0].calls == (SaidCall("find", "{}"),)


@pytest.mark.parametrize(
    ("messages", "fate", "reason"),
    [
        ([SAID[4]], "not_playable", "no message of a user comes first"),
        ([SAID[1], SAID[0], SAID[4]], "not_playable", "a system message follows a user's"),
        ([SAID[1], SAID[3], SAID[4]], "not_playable", "answer comes before the first turn"),
        ([SAID[1], SAID[4], SAID[4]], "not_playable", "turns 1 and 2 have nothing between them"),
        ([SAID[1], SAID[2], SAID[1], SAID[4]], "not_playable", "turn 1 has 1 calls and 0 answers"),
        (
            [SAID[1], SAID[2], {**SAID[3], "tool_call_id": "z"}, SAID[4]],
            *("not_playable", "answers after turn 1 are not those to its calls"),
        ),
        (
            [SAID[1], SAID[4], SAID[0], SAID[4]],
            *("not_playable", "turn 1 is followed by other messages"),
        ),
        (
            [{"role": "user", "content": [{"type": "image", "image": "x"}]}, SAID[4]],
            *("with_pictures", "it shows pictures"),
        ),
    ],
)
def test_what_no_policy_could_have_played_is_left_out_with_the_reason(
    messages: Any, fate: str, reason: str
) -> None:
    with pytest.raises(LeftOutError, match=reason) as raised:
        read(messages=messages)
    assert raised.value.fate == fate


def test_parts_of_text_are_one_text() -> None:
    parts = [{"type": "text", "text": "Find "}, {"type": "text", "text": "it."}]
    found = read(messages=[{"role": "user", "content": parts}, SAID[4]])
    assert found.prompt == "Find it."
