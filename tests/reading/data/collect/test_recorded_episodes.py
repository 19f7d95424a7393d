"""Recorded episodes in whichever form, and the solution that a conversation holds."""

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla_reading.data.collect.recorded_episodes import (
    find_solution,
    read_episodes,
    to_episode,
)
from flotilla_reading.data.entries import DataError
from flotilla_reading.play.solutions import format_solutions

USER = {"role": "user", "content": "Do it."}


def calls(*made: tuple[str, Any]) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": "act", "arguments": arguments}}
            for call_id, arguments in made
        ],
    }


def result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "ok"}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def test_a_solution_has_the_calls_that_were_executed_and_the_answer() -> None:
    messages = [
        USER,
        calls(("a", '{"n": 1}'), ("b", "no JSON"), ("c", '{"n": 3}')),
        *(result("a"), result("b")),
        # A policy may use its ids again; the second call of this turn was left out by a limit.
        calls(("a", '{"n": 4}'), ("c", '{"n": 5}')),
        result("a"),
        answer("It is done. <done>"),
    ]
    found = find_solution("task", messages, stopped=False)
    assert [call.arguments for call in found.calls] == [{"n": 1}, {"n": 4}]
    assert found.answer == "It is done."
    assert find_solution("task", messages, stopped=True).answer is None
    assert find_solution("task", messages[:-1], stopped=False).answer is None


def test_rows_of_every_form_become_the_same_episode() -> None:
    said = [USER, calls(("a", {"n": 1})), result("a"), answer("done")]
    tool = {"type": "function", "function": {"name": "act", "parameters": {}}}
    table = {"reasoning_content": None, "tool_call_id": None, "name": None, "tool_calls": []}
    wide = [{**table, **USER}, calls(("a", '{"n": 1}')), {**table, **result("a")}, answer("done")]
    dumped = to_episode({"task_key": "t", "messages": said, "reward": 1, "tools": [tool]})
    exported = to_episode(
        {"task_key": "t", "messages": wide, "reward": 1.0, "tools": json.dumps([tool])}
    )
    assert dumped == exported
    assert dumped.messages[1]["tool_calls"][0]["function"]["arguments"] == '{"n": 1}'
    ungraded = to_episode({"key": "t", "messages": said, "reward": None, "failure": "crash"})
    assert (ungraded.reward, ungraded.no_grade, ungraded.tools) == (None, "crash", None)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "expected an object"),
        ({"messages": [USER], "reward": 1}, "it names no task: expected one of task_key, task,"),
        ({"key": "t", "messages": [USER]}, 'needs "reward", a number or null'),
        ({"key": "t", "messages": [USER], "reward": "1"}, 'needs "reward", a number or null'),
        ({"key": "t", "messages": [], "reward": 1}, 'needs "messages", a list that is not empty'),
        ({"key": "t", "messages": ["hi"], "reward": 1}, "messages[0] is no message with a role"),
        (
            {"key": "t", "messages": [{**USER, "tool_calls": [{"name": "x"}]}], "reward": 1},
            "messages[0].tool_calls: no call of a function",
        ),
        ({"key": "t", "messages": [USER], "reward": 1, "tools": {}}, '"tools" must be a list'),
        # A pass, if infinity were a number.
        ('{"key": "t", "messages": [], "reward": Infinity}', 'needs "reward", a number or null'),
        ('{"key": "t", "messages": [], "reward": NaN}', 'needs "reward", a number or null'),
        ({"key": "t", "messages": [USER], "reward": 10**400}, 'needs "reward", a number or null'),
        (
            {"key": "t", "messages": [{**USER, "tool_calls": [{"function": 5}]}], "reward": 1},
            "messages[0].tool_calls: no call of a function",
        ),
        (
            {"key": "t", "messages": [{**result("a"), "tool_call_id": ["a"]}], "reward": 1},
            "messages[0].tool_call_id must be a text",
        ),
        (
            {"key": "t", "messages": [USER], "reward": 1, "tools": "[" * 10_000},
            "it is nested more than 100 deep",
        ),
    ],
)
def test_a_row_that_is_no_episode_is_named_by_its_line(
    tmp_path: Path, row: Any, message: str
) -> None:
    path = tmp_path / "episodes.jsonl"
    good = json.dumps({"key": "t", "messages": [USER], "reward": 0})
    path.write_text(f"{good}\n\n{row if isinstance(row, str) else json.dumps(row)}\n")
    with pytest.raises(DataError) as refused:
        list(read_episodes(path))
    assert str(refused.value).startswith(f"{path}: line 3: ")
    assert message in str(refused.value)


def test_what_no_file_can_hold_is_replaced_in_an_episode_and_in_its_solution() -> None:
    said = [calls(("a", '{"guest": "\\ud800", "nights": NaN}')), result("a"), answer("\ud800!")]
    read = to_episode(
        {"key": "t", "messages": said, "reward": None, "no_grade": "\ud800", "tools": [1e999]}
    )
    assert (read.messages[-1]["content"], read.no_grade, read.tools) == ("?!", "?", [None])
    found = find_solution("t", read.messages, stopped=False)
    assert found.calls[0].arguments == {"guest": "?", "nights": None}
    assert format_solutions([found])


def test_an_answer_in_parts_is_its_text() -> None:
    parts = [{"type": "text", "text": "It is "}, {"type": "image_url"}, {"type": "text"}]
    said = [USER, {"role": "assistant", "content": [*parts, {"type": "text", "text": "done."}]}]
    assert find_solution("t", said, stopped=False).answer == "It is done."
