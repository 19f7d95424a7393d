"""Turns of which some readers make other calls than those that were written."""

from dataclasses import replace

import pytest

from flotilla_rollout.dialects.turns import ParseError
from flotilla_rollout.types import Tool
from tests.rollout.dialects.families import FAMILIES, SMALL_ONE, Family
from tests.rollout.dialects.native_calls import CASES
from tests.rollout.dialects.stages import Stage, calls_of, executed, stage_of
from tests.support.model_zoo import SMALL

_BY_VLLM = (pytest.mark.slow, pytest.mark.filterwarnings("default"))
_NAMES = [
    pytest.param(family.name, marks=_BY_VLLM if family.read_by_vllm else ()) for family in FAMILIES
]
_THINKING = [family.name for family in FAMILIES if family.think]
_ONE = CASES[0]
_RED = ("search", {"query": "red shoes"})


def _body(stage: Stage, text: str) -> str:
    """Return a turn without its thinking and its end."""
    for end in stage.family.ends:
        text = text.removesuffix(end)
    return text.rpartition("</think>")[2]


@pytest.mark.parametrize("name", _THINKING)
def test_a_call_within_a_thinking_that_is_never_closed_is_not_executed(name: str) -> None:
    stage = stage_of(name)
    turn = stage.write(replace(_ONE, thought="Let me see."))
    close = (stage.family.think or "").partition("{}")[2] or stage.family.close
    close = close if close in turn else stage.family.close
    assert close in turn
    assert executed(stage.read(stage.writer.encode(turn))), "the thinking is closed"
    ids = stage.writer.encode(turn.replace(close, "\n", 1))
    read = stage.read(ids)
    assert not read.items
    assert read.thinking_tokens >= len(ids) - 1


@pytest.mark.parametrize("name", _NAMES)
def test_two_equal_keys_are_never_one_argument(name: str) -> None:
    stage = stage_of(name)
    text = stage.write(_ONE)
    for written, twice in (
        ('"query": "red shoes"', '"query": "a", "query": "b"'),
        ('query:<|"|>red shoes<|"|>', 'query:<|"|>a<|"|>,query:<|"|>b<|"|>'),
    ):
        if written in text:
            turn = stage.read(stage.writer.encode(text.replace(written, twice)))
            assert turn.items and not executed(turn) and not turn.done, turn


@pytest.mark.parametrize("name", _NAMES)
def test_a_second_section_of_calls_is_read_or_reported(name: str) -> None:
    stage = stage_of(name)
    if stage.family.single_call:
        pytest.skip("one call ends its turn")
    turn = stage.write(_ONE)
    body = _body(stage, turn)
    read = stage.read(stage.writer.encode(f"{turn[: turn.rindex(body)]}{body}\n{body}"))
    assert len(read.items) == 2
    assert all(each == _RED or isinstance(each, str) for each in calls_of(read))


@pytest.mark.parametrize("name", _NAMES)
def test_both_sides_of_every_cut_hold_the_whole_call_or_none(name: str) -> None:
    """A call that is cut may also be begun again, in the same turn."""
    stage = stage_of(name)
    turn = stage.write(_ONE)
    body = stage.writer.encode(_body(stage, turn))
    before = stage.writer.encode(turn[: turn.rindex(_body(stage, turn))])
    for cut in range(1, len(body)):
        for ids in (body[:cut], body[cut:], [*body[:cut], *body]):
            read = stage.read([*before, *ids])
            assert all(each == _RED or isinstance(each, str) for each in calls_of(read)), read


@pytest.mark.parametrize("name", _NAMES)
def test_a_text_that_is_not_ended_is_not_completed(name: str) -> None:
    stage = stage_of(name)
    text = stage.write(_ONE)
    for quoted in ('red shoes"', 'red shoes<|"|>'):
        if quoted in text:
            turn = stage.read(stage.writer.encode(text.replace(quoted, "red shoes")))
            assert turn.items and not executed(turn), turn


@pytest.mark.parametrize("name", _NAMES)
def test_a_tool_is_never_named_by_a_call_in_another_form(name: str) -> None:
    stage = stage_of(name)
    text = stage.write(_ONE)
    for named in ('{"name": "search"}', "search(query='a')", 'search{"query": "a"}', "<search>"):
        turn = stage.read(stage.writer.encode(text.replace("search", named, 1)))
        assert not executed(turn) and not turn.done, turn


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('"true">12345', "12345"),
        ('"false">12345', 12345),
        ('"true">null', "null"),
        ('"true">007', "007"),
        ('"false">9007199254740993', 9007199254740993),
        ('"false">[1, 2]', [1, 2]),
    ],
)
def test_deepseek_v4_says_itself_which_arguments_are_texts(written: str, read: object) -> None:
    stage = stage_of("DeepSeek V4")
    text = stage.write(_ONE).replace('"true">red shoes', written)
    tools = (Tool("search", "", {"type": "object", "properties": {"query": {}}}),)
    turn = stage.dialect.parse_turn(stage.prompt_ids, stage.writer.encode(text), tools)
    assert calls_of(turn) == [("search", {"query": read})]


def test_an_argument_that_deepseek_v4_does_not_write_as_text_must_be_json() -> None:
    stage = stage_of("DeepSeek V4")
    text = stage.write(_ONE).replace('"true">red', '"false">red')
    [error] = stage.read(stage.writer.encode(text)).items
    assert isinstance(error, ParseError) and "not valid JSON" in error.message


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_unquoted_texts_that_look_like_numbers_stay_texts_with_vllms_parser() -> None:
    control = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>", "<|patch|>", "<|video|>")
    stage = Stage(
        Family(
            "Muse Glimmer",
            ("muse",),
            "llama-cpp/muse-glimmer.jinja",
            SMALL,
            SMALL_ONE,
            ("<|eom|>", "<|eot|>"),
            "template",
            control,
            parser="muse_glimmer",
        )
    )
    text = stage.write(_ONE)
    for value in ("12345", "null", "true", "[1]", "007", "None"):
        turn = stage.read(stage.writer.encode(text.replace("red shoes", value)))
        assert calls_of(turn) == [("search", {"query": value})]
    turn = stage.read(stage.writer.encode(text.replace("red shoes", "1.50")))
    assert turn.items and not executed(turn), "vLLM reads it as 1.5"
