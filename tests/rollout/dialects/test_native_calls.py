"""Native calls of every family, spelled by its own template in the ids of its tokenizer."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken

from flotilla_rollout.dialects.full import FullDialect
from flotilla_rollout.dialects.rehearsal import find_untold, rehearse_dialect
from flotilla_rollout.dialects.turns import OK, Reply, ToolCall
from flotilla_rollout.tokenizer_port import TemplateError
from tests.rollout.dialects.families import FAMILIES, HIDDEN
from tests.rollout.dialects.native_calls import CASES, TOOLS, Case
from tests.rollout.dialects.stages import Stage, calls_of, executed, stage_of
from tests.support.model_zoo import read_template

# vLLM takes ten seconds to import, and what it and torch warn about then is theirs to mend.
_BY_VLLM = (pytest.mark.slow, pytest.mark.filterwarnings("default"))
_NAMES = [
    pytest.param(family.name, marks=_BY_VLLM if family.read_by_vllm else ()) for family in FAMILIES
]
# Those whose calls begin with a token of their own.
_OURS = [family for family in FAMILIES if not family.read_by_vllm]
_WITH_TOKENS = [family.name for family in _OURS if not family.calls_are_text]
_AS_THE_TEMPLATE = [family.name for family in _OURS if not family.follows]
_OF_SEVERAL = [f.name for f in _OURS if not f.follows and not f.single_call]
# DeepSeek V3's tokenizer, used to test R1, has no token that ends a thinking.
_THINKING = [f.name for f in _OURS if f.think and f.name != "DeepSeek R1"]
_NESTED = next(case for case in CASES if case.name == "an order with nested objects")
_ONE = CASES[0]
_TWO = next(case for case in CASES if case.name == "two calls")
# Ways to misspell the arguments of its call, in some family.
_OBJECT = '{"query": "red shoes"}'
_SPOILED = (
    ('"arguments"', '"args"'),
    ('"parameters"', '"args"'),
    (f', "arguments": {_OBJECT}', ""),
    (f', "parameters": {_OBJECT}', ""),
    (_OBJECT, ""),
    (_OBJECT, '"red shoes"'),
    (_OBJECT, "null"),
    (_OBJECT, "[]"),
    ("<parameter=query>\nred shoes\n</parameter>\n", ""),
    ("<parameter=", "<param="),
    ("<arg_key>", "<key>"),
    ("parameter name=", "param name="),
    ('{query:<|"|>red shoes<|"|>}', ""),
)
ANSWERS = (
    '{"found": ["a \\"b\\"", 1]}',
    "two lines\nof text \u00e9\u4e2d\U0001f600\n",
    " padded <b>&amp;</b> ",
    "",
    "[]",
)


def test_the_corpus_is_large_enough() -> None:
    assert len(FAMILIES) >= 14
    assert sum(len(case.calls) for family in FAMILIES for case in family.cases) >= 300


@pytest.mark.parametrize("name", _NAMES)
def test_a_family_passes_its_rehearsal(name: str) -> None:
    stage = stage_of(name)
    if not stage.family.hides_tools:
        rehearse_dialect(stage.dialect, stage.tokenizer)
        return
    with pytest.raises(TemplateError, match=f'{HIDDEN}, .*set rollout.dialect.name = "full"'):
        rehearse_dialect(stage.dialect, stage.tokenizer)
    full = FullDialect(stage.tokenizer)
    rehearse_dialect(full, stage.tokenizer)
    assert not find_untold(full, stage.tokenizer)


def test_a_turn_that_the_next_role_ends_is_no_part_of_the_call_before_it() -> None:
    """GLM's template ends no turn by a token of its own; `</tool_call>` stands last."""
    glm = next(family for family in FAMILIES if family.name == "GLM-4.5, GLM-4.6")
    stage = Stage(replace(glm, dialect="template", parser="glm45"))
    rehearse_dialect(stage.dialect, stage.tokenizer, "tool_cycle")
    assert stage.dialect.stop_ids == tuple(stage.tokenizer.encode("<|observation|>"))
    wrong = {case.name: found for case in glm.cases if (found := _misread(stage, case))}
    assert not wrong


@pytest.mark.parametrize("name", _NAMES)
def test_thinking_stays_in_a_tool_cycle_where_the_page_states_so(name: str) -> None:
    """Two thinking turns, token by token, equal the template's rendering of both."""
    stage = stage_of(name)
    if stage.family.hides_tools:
        pytest.skip("it is refused in any case")
    if not stage.family.drops_thinking:
        rehearse_dialect(stage.dialect, stage.tokenizer, "tool_cycle")
        return
    with pytest.raises(TemplateError, match=r'"tool_cycle" cannot be kept: .*; set it to "all"'):
        rehearse_dialect(stage.dialect, stage.tokenizer, "tool_cycle")


@pytest.mark.parametrize("name", _THINKING)
def test_a_thinking_that_is_ended_for_the_policy_is_followed_by_its_calls(name: str) -> None:
    stage, thought = stage_of(name), "Let me see what there is."
    begin, _, rest = stage.write(replace(_ONE, thought=thought)).partition(thought)
    close = (stage.family.think or "").partition("{}")[2] if begin else stage.family.close
    # Gemma's template begins a line for it.
    rest = rest.removeprefix("\n" * (not rest.startswith(close)))
    assert rest.startswith(close)
    ids = stage.writer.encode(begin + thought)
    ended = [*ids, *stage.dialect.thinking.end_ids]
    assert stage.dialect.thinking.is_thinking(ids) and not stage.dialect.thinking.is_thinking(ended)
    assert stage.tokenizer.decode(ended[len(ids) :]).lstrip("\n") == close.lstrip("\n")
    turn = stage.read([*ended, *stage.writer.encode(rest.removeprefix(close))])
    assert calls_of(turn) == [("search", {"query": "red shoes"})]
    assert len(ids) < turn.thinking_tokens <= len(ended)


@pytest.mark.parametrize("name", _NAMES)
def test_native_calls_are_executed_with_exactly_their_arguments(name: str) -> None:
    stage = stage_of(name)
    # One test for all cases of a family: there are more than a thousand.
    wrong = {case.name: found for case in stage.family.cases if (found := _misread(stage, case))}
    assert not wrong


def _misread(stage: Stage, case: Case) -> Any:
    """Return the reading of a native turn if it differs from the turn."""
    _, turn = stage.play(case)
    if case.name in stage.family.refused:
        return None if turn.items and not executed(turn) else calls_of(turn)
    # A template may leave out text beside a call, or make it a thinking.
    text = case.text if case.text in stage.write(case) else ""
    right = (
        calls_of(turn) == [(called, dict(arguments)) for called, arguments in case.calls]
        and (turn.answer == text or (turn.thinking_tokens and not turn.answer))
        and (turn.thinking_tokens > 0 or not case.thought)
        and not turn.done
    )
    return None if right else turn


@pytest.mark.parametrize("name", _NAMES)
def test_arguments_that_are_left_out_or_stand_elsewhere_are_an_error_and_never_none(
    name: str,
) -> None:
    stage = stage_of(name)
    text = stage.write(_ONE)
    spoiled = {text.replace(part, instead, 1) for part, instead in _SPOILED if part in text}
    assert spoiled
    for each in spoiled:
        turn = stage.read(stage.writer.encode(each))
        assert turn.items and not executed(turn) and not turn.done, (each, turn)


@pytest.mark.parametrize("name", _WITH_TOKENS)
def test_a_call_that_is_spelled_in_ordinary_tokens_is_none(name: str) -> None:
    stage = stage_of(name)
    for case in (_ONE, _NESTED):
        assert not stage.read(stage.writer.encode(stage.write(case), plain=True)).items


@pytest.mark.parametrize("name", _NAMES)
def test_a_call_that_is_cut_anywhere_is_whole_or_not_executed(name: str) -> None:
    stage = stage_of(name)
    ids, turn = stage.play(_NESTED)
    (whole,) = calls_of(turn)
    for end in range(1, len(ids)):
        found = calls_of(stage.read(ids[:end]))
        assert all(isinstance(each, str) or each == whole for each in found), (end, found)


@pytest.mark.parametrize("name", _AS_THE_TEMPLATE)
@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_is_shown_as_the_template_shows_it(name: str, answer: str) -> None:
    stage = stage_of(name)
    ids, turn = stage.play(_ONE)
    (call,) = executed(turn)
    reply = Reply(call, OK, [answer])
    follows = stage.dialect.bridge_ids(stage.prompt_ids, ids, [reply], TOOLS)
    shown = stage.dialect.reply_text(reply)
    whole = stage.writer.write_replies(_ONE, TOOLS, [call.call_id], [shown])
    assert whole.endswith(stage.tokenizer.decode(follows))


@pytest.mark.parametrize("name", _NAMES)
def test_no_answer_spells_a_token_that_structures_a_conversation(name: str) -> None:
    """DeepSeek's `<\uff5cUser\uff5c>` and Qwen's `<tool_call>` are no special tokens of their
    tokenizers."""
    stage = stage_of(name)
    added = stage.tokenizer.fast.added_tokens_decoder
    template = read_template(stage.family.template)
    forms = [str(token) for token in added.values() if _is_structure(token, template)]
    assert len(forms) > 3

    def count_added(answer: str) -> Counter[int]:
        reply = Reply(ToolCall("list_open", "{}"), OK, [answer])
        follows = stage.dialect.bridge_ids(stage.prompt_ids, stage.writer.encode("x"), [reply], ())
        return Counter(token for token in follows if token in added)

    harmless = count_added(" a" * len(forms))
    assert not count_added(" a".join(forms)) - harmless


def _is_structure(token: AddedToken, template: str) -> bool:
    text = str(token)
    looks = text.startswith(("<|", "<\uff5c")) or text.endswith(("|>", "\uff5c>"))
    return token.special or looks or (text[:1] in "<[" and text.strip() == text in template)


def test_an_answer_in_html_is_shown_as_it_is() -> None:
    """Gemma's vocabulary has tokens for tags that structure pages, and no conversation."""
    stage, page = stage_of("Gemma 4"), "<table><tr><td>1</td></tr></table>"
    reply = Reply(ToolCall("list_open", "{}"), OK, [page])
    follows = stage.dialect.bridge_ids(stage.prompt_ids, stage.writer.encode("x"), [reply], ())
    assert page in stage.tokenizer.decode(follows)


@pytest.mark.parametrize("name", _OF_SEVERAL)
def test_answers_to_two_calls_are_shown_in_their_order(name: str) -> None:
    stage = stage_of(name)
    ids, turn = stage.play(_TWO)
    calls = executed(turn)
    replies = [Reply(call, OK, [text]) for call, text in zip(calls, ANSWERS, strict=False)]
    follows = stage.dialect.bridge_ids(stage.prompt_ids, ids, replies, TOOLS)
    whole = stage.writer.write_replies(_TWO, TOOLS, [call.call_id for call in calls], ANSWERS[:2])
    assert whole.endswith(stage.tokenizer.decode(follows))


@pytest.mark.parametrize("name", _NAMES)
def test_the_next_turn_follows_however_a_turn_was_ended(name: str) -> None:
    """The turn also ends in an unclosed thinking, and at an end of text that ends no turn."""
    stage = stage_of(name)
    reported = [Reply(None, "no_call", [])]
    text = stage.writer.encode("nonsense")
    thought = stage.writer.encode((stage.family.think or "").partition("{}")[0] + "nonsense")
    for end in stage.dialect.stop_ids:
        follows = [
            stage.dialect.bridge_ids(stage.prompt_ids, [*turn, end], reported, TOOLS)
            for turn in (text, thought, [])
        ]
        assert len(set(map(tuple, follows))) == 1
        assert "no tool call found" in stage.tokenizer.decode(follows[0])
