"""Calls and answers of any text, through every family, are read as they were written."""

import re
import unicodedata
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from flotilla_rollout.dialects.turns import OK, PlayedTurn, Reply
from tests.rollout.dialects.families import FAMILIES
from tests.rollout.dialects.native_calls import CASES, TOOLS, Case
from tests.rollout.dialects.stages import FACTS, Stage, calls_of, executed, stage_of
from tests.support.examples import examples

# One for each way to spell a call and to end a turn.
_QUICK = ("Llama 3.2", "Qwen3", "DeepSeek V3.1", "GLM-4.5, GLM-4.6", "Kimi K2", "MiniMax M2")
_LATER = (pytest.mark.slow, pytest.mark.filterwarnings("default"))
_NAMES = [
    pytest.param(family.name, marks=() if family.name in _QUICK else _LATER) for family in FAMILIES
]
_EXAMPLES = settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)
# Text that may be taken for structure, of any family.
_TRICKS = (
    *("<tool_call>", "</tool_call>", "</parameter>", "<parameter=a>", "</function>", "</invoke>"),
    *("</arg_value>", "<arg_key>", "[TOOL_CALLS]", "[ARGS]", "</think>", "<think>", "<|im_end|>"),
    *("<|eot_id|>", "<|call|>", "<|message|>", "</s>", "<tool_call|>", '<|"|>', "```", "{}", '"}'),
    *("<\uff5ctool\u2581call\u2581end\uff5c>", "<|tool_call_end|>", "<|observation|>", "[e~["),
    *("<tool_response>", "</tool_response>", "[/TOOL_RESULTS]", "<turn|>", "\\", "\\n", "\\u00e9"),
)
_LETTERS = st.characters(codec="utf-8", exclude_categories=("Cs", "Co", "Cn"))
# Some vocabularies compose letters and their accents.
_TEXTS = st.lists(
    st.one_of(st.sampled_from(_TRICKS), st.text(_LETTERS, max_size=8)), max_size=5
).map(lambda pieces: unicodedata.normalize("NFC", "".join(pieces)))
_NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False, width=32)
)
_VALUES = st.recursive(
    st.one_of(_TEXTS, _NUMBERS, st.booleans(), st.none()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=5,
)
_NOTES = st.fixed_dictionaries({"title": _TEXTS, "body": _TEXTS}).map(lambda a: ("save_note", a))
_SEARCHES = st.fixed_dictionaries(
    {"query": _TEXTS},
    optional={
        "limit": st.integers(-(2**70), 2**70),
        "exact": st.booleans(),
        "tags": st.lists(_TEXTS, max_size=3),
        "where": st.dictionaries(st.sampled_from("abc"), _VALUES, max_size=3),
    },
).map(lambda a: ("search", a))
_BORDER = re.compile(r"</parameter>\s*<parameter=")
_CALLS = st.one_of(_NOTES, _SEARCHES)


@pytest.mark.parametrize("name", _NAMES)
@_EXAMPLES
@example(call=("save_note", {"title": "", "body": "[ARGS]"}))
@given(call=_CALLS)
def test_a_call_that_is_written_is_read_as_it_was(name: str, call: tuple[str, Any]) -> None:
    stage = stage_of(name)
    # A text that ends its argument and begins another reads as two arguments.
    assume(not stage.family.refused or not _BORDER.search(str(call[1])))
    # Some vocabularies write a space and U+2581 by one token.
    assume("\u2581" not in str(call[1]) or _differs_from_space(stage, "\u2581"))
    _, turn = stage.play(Case("any", (call,)))
    # Arguments that cannot be distinguished from the structure around them are refused.
    if turn.items and not executed(turn) and stage.family.refused:
        return
    assert calls_of(turn) == [call]


@pytest.mark.parametrize("name", _NAMES)
@_EXAMPLES
@given(answer=_TEXTS)
def test_an_answer_follows_a_turn_as_if_all_were_rendered_at_once(name: str, answer: str) -> None:
    stage = stage_of(name)
    ids, turn = stage.play(CASES[0])
    calls = executed(turn)
    replies = [Reply(call, OK, [answer]) for call in calls]
    follows = stage.dialect.bridge_ids(stage.prompt_ids, ids, replies, TOOLS)
    whole = stage.dialect.render_turns(FACTS, TOOLS, [PlayedTurn(calls, replies)])
    assert whole[-len(follows) :] == follows


def _differs_from_space(stage: Stage, text: str) -> bool:
    return stage.tokenizer.decode(stage.tokenizer.encode(text)).strip() == text
