"""Drills: values change everywhere at once, and words of the language stay."""

import json
import random
from itertools import islice

import pytest

from flotilla_common.episodes.conversations import Conversation
from flotilla_environments.tiny_policy.drills import find_values, leaves_of, make_drills, words_of
from tests.environments.tiny_policy.shown_notes import NAMES, note_rows, shown_row, to_conversation

SHOWN = [to_conversation(row) for row in note_rows()]


def arguments_of(conversation: Conversation) -> list[str]:
    calls = [json.loads(call.arguments) for turn in conversation.turns for call in turn.calls]
    return leaves_of(calls)


def draw(count: int, lazy: float, seed: int = 0) -> list[Conversation]:
    return list(islice(make_drills(SHOWN, NAMES, lazy, random.Random(seed)), count))


def test_all_that_a_call_is_given_stands_in_the_prompt() -> None:
    drills = draw(200, lazy=0.0)
    for drill in drills:
        assert all(value in drill.prompt for value in arguments_of(drill))
    values = {value for drill in drills for value in arguments_of(drill)}
    assert len(values) > 100


def test_words_of_the_language_stay_as_they_are() -> None:
    for drill in draw(200, lazy=0.0):
        assert drill.prompt.startswith(("Write ", "Drop "))
        assert "into the note " in drill.prompt


def test_a_value_in_an_answer_changes_with_the_call() -> None:
    shown = to_conversation(
        shown_row(
            *("a", "Write down: salt."),
            ("write_note", {"path": "x", "content": "salt"}, "note 17 has salt"),
            ("drop_note", {"path": "17"}, "dropped"),
        )
    )
    assert find_values(shown) == ["salt", "17"]
    for drill in islice(make_drills([shown], NAMES, 0.0, random.Random(1)), 50):
        written, dropped = arguments_of(drill)[1], arguments_of(drill)[2]
        assert drill.turns[0].replies[0].text == f"note {dropped} has {written}"
        assert drill.prompt == f"Write down: {written}."
        assert arguments_of(drill)[0] == "x"


def test_a_final_answer_changes_with_what_a_tool_has_said() -> None:
    row = shown_row(
        "a", "When was cedar written?", ("write_note", {"path": "cedar"}, '{"at": "9:30"}')
    )
    row["messages"][-1]["content"] = "9:30"
    shown = to_conversation(row)
    assert find_values(shown) == ["cedar", "9:30"]
    for drill in islice(make_drills([shown], NAMES, 0.0, random.Random(1)), 50):
        assert drill.turns[0].replies[0].text == f'{{"at": "{drill.turns[1].content}"}}'
    gives_up = next(make_drills([shown], NAMES, 1.0, random.Random(1)))
    assert [turn.content for turn in gives_up.turns] == ["Done."]


def test_of_a_query_only_words_of_the_prompt_change() -> None:
    call = {"query": "INSERT INTO items (name, price) VALUES ('potato', 3)"}
    shown = to_conversation(
        shown_row("a", "Add to items: potato, for 3.", ("write_note", call, "ok"))
    )
    assert find_values(shown) == ["items", "potato", "3"]
    for drill in islice(make_drills([shown], NAMES, 0.0, random.Random(1)), 50):
        [query] = arguments_of(drill)
        assert query.startswith("INSERT INTO ")
        assert " (name, price) VALUES ('" in query


def test_a_lazy_player_gives_up_before_any_call() -> None:
    ends = [sum(len(turn.calls) for turn in drill.turns) for drill in draw(400, lazy=0.5)]
    assert 0.4 < ends.count(0) / len(ends) < 0.6
    assert all(drill.turns[-1].content == "Done." for drill in draw(50, lazy=0.5))
    assert all(not drill.turns[0].calls for drill in draw(50, lazy=1.0))


def test_drills_follow_from_the_seed() -> None:
    assert draw(20, 0.5) == draw(20, 0.5)
    assert draw(20, 0.5) != draw(20, 0.5, seed=1)


def test_demonstrations_without_a_call_are_refused() -> None:
    silent = to_conversation(shown_row("a", "Say nothing."))
    with pytest.raises(ValueError, match="no demonstration calls a tool"):
        next(make_drills([silent], NAMES, 0.5, random.Random(0)))


def test_numbers_are_no_words() -> None:
    assert words_of(["two of 3 eggs", "eggs 3"]) == ["two", "of", "eggs"]
