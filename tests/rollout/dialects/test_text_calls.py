"""Llama's calls, which begin with no token of their own: what begins like one is no answer."""

import pytest

from flotilla_rollout.dialects.turns import ParseError
from tests.rollout.dialects.stages import Stage, calls_of, stage_of

CALL = '{"name": "search", "parameters": {"query": "red shoes"}}'
READ = [("search", {"query": "red shoes"})]


@pytest.fixture(scope="module")
def llama() -> Stage:
    return stage_of("Llama 3.2")


@pytest.mark.parametrize("end", ["<|eot_id|>", "<|eom_id|>"])
@pytest.mark.parametrize("tag", ["", "<|python_tag|>"])
def test_a_call_is_read_with_the_tag_that_models_put_before_it(
    llama: Stage, tag: str, end: str
) -> None:
    turn = llama.read(llama.writer.encode(f"{tag}{CALL}{end}"))
    assert (calls_of(turn), turn.done, turn.answer) == (READ, False, "")


@pytest.mark.parametrize(
    ("written", "cause"),
    [
        ('{"name": "search", "parameters": }', "not valid JSON: Expecting value"),
        ('{"name": "search", "parameters": {"query": "a"}', "not valid JSON: Expecting ','"),
        ('{"type": "function", "name": "search"', "not valid JSON"),
        (f"{CALL}; {CALL}", "one call a turn"),
        (f"{CALL} and so on", "one call a turn"),
        ('<|python_tag|>search.call(query="red shoes")', "not in the form of this model's calls"),
        ('<|python_tag|>{"name": "search", ', "not valid JSON"),
    ],
)
def test_what_begins_like_a_call_and_is_none_is_an_error_that_the_policy_reads(
    llama: Stage, written: str, cause: str
) -> None:
    turn = llama.read(llama.writer.encode(written + "<|eot_id|>"))
    [error] = turn.items
    assert isinstance(error, ParseError)
    assert cause in error.message
    assert not turn.done


@pytest.mark.parametrize(
    "answer", ["It is 4.", '{"total": 4}', "{not a call", 'The call {"name":', "[1, 2]", ""]
)
def test_all_else_is_an_answer(llama: Stage, answer: str) -> None:
    turn = llama.read(llama.writer.encode(answer + "<|eot_id|>"))
    assert (turn.items, turn.done, turn.answer) == ((), True, answer)
