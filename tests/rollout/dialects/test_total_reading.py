"""Any sampled tokens give a turn in every family, and what is executed stands in them."""

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flotilla_rollout.dialects.turns import ParseError
from flotilla_rollout.types import Tool
from tests.rollout.dialects.families import FAMILIES
from tests.rollout.dialects.native_calls import CASES, TOOLS
from tests.rollout.dialects.stages import Stage, executed, stage_of

_BY_VLLM = (pytest.mark.slow, pytest.mark.filterwarnings("default"))
_NAMES = [
    pytest.param(family.name, marks=_BY_VLLM if family.read_by_vllm else ()) for family in FAMILIES
]
_QUICK = [family.name for family in FAMILIES if not family.read_by_vllm]
_ALL = [family.name for family in FAMILIES]
_SUPPRESSED = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)
# Texts that some reader cannot read, or takes for structure.
_TRICKS = (
    *("1" * 4_301, "-" + "9" * 5_000, "[" * 500, '{"a":' * 500, "]" * 500, "1e999", "NaN", "\\"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_call>{", "[TOOL_CALLS]", "{}"),
    *('"', "'", "null", "007", "\\ud800", '{"name": "search"}', '"query": "b", ', "red", "```json"),
)
# The last ones are of environments that write no JSON Schema.
_ODD = (
    *({"type": 5}, {"type": [["string"]]}, {"type": "any"}, {"enum": 3}, {"anyOf": [1, None]}),
    *({"$ref": "#/properties/query"}, {"$ref": 7}, {"allOf": {}}, True, None, [], "string"),
)
_TOOL_SETS: Sequence[Sequence[Tool]] = (
    TOOLS,
    (),
    *(
        (Tool("search", "", {"type": "object", "properties": {"query": odd}, "required": odd}),)
        for odd in _ODD
    ),
    *((Tool("search", "", {"properties": odd}),) for odd in (True, None, [], "x")),
)
_PARTS = 64
# Either a slice of a native turn, by its case and two of its parts, or a text, or tokens.
_SLICES = st.tuples(st.integers(0, len(CASES) - 1), st.integers(0, _PARTS), st.integers(0, _PARTS))
_PIECES = st.lists(
    st.one_of(
        _SLICES,
        _SLICES.map(lambda piece: (piece[0], 0, _PARTS)),
        st.sampled_from(_TRICKS),
        st.lists(st.integers(0, 5_000), max_size=5),
    ),
    max_size=5,
)


def _write(stage: Stage, pieces: Sequence[Any]) -> list[int]:
    ids: list[int] = []
    for piece in pieces:
        if isinstance(piece, str):
            ids += stage.writer.encode(piece)
        elif isinstance(piece, list):
            ids += piece
        else:
            number, start, end = piece
            case = CASES[number]
            case = case if len(case.calls) == 1 or not stage.family.single_call else CASES[0]
            native = stage.writer.encode(stage.write(case))
            ids += native[start * len(native) // _PARTS : end * len(native) // _PARTS]
    return ids


def _check(name: str, pieces: Sequence[Any], tools: Sequence[Tool]) -> None:
    stage = stage_of(name)
    ids = _write(stage, pieces)
    turn = stage.dialect.parse_turn(stage.prompt_ids, ids, tools)
    text = stage.tokenizer.decode(ids)
    for call in executed(turn):
        assert call.name in text
        for part in _texts(json.loads(call.arguments_json)):
            spellings = [part, json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1]]
            assert any(each in text for each in spellings), (name, part, text)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
    for each in value.values() if isinstance(value, dict) else value:
        if isinstance(each, (dict, list)) or (isinstance(each, str) and not isinstance(value, str)):
            yield from _texts(each)


@pytest.mark.timeout(400)
@given(st.sampled_from(_QUICK), _PIECES, st.sampled_from(_TOOL_SETS))
@settings(max_examples=2_000, deadline=None, suppress_health_check=_SUPPRESSED, database=None)
def test_any_turn_is_read_in_every_family(
    name: str, pieces: Sequence[Any], tools: Sequence[Tool]
) -> None:
    _check(name, pieces, tools)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("default")
@given(st.sampled_from(_ALL), _PIECES, st.sampled_from(_TOOL_SETS))
@settings(max_examples=100_000, deadline=None, suppress_health_check=_SUPPRESSED, database=None)
def test_a_hundred_thousand_turns_are_read(
    name: str, pieces: Sequence[Any], tools: Sequence[Tool]
) -> None:
    _check(name, pieces, tools)


@pytest.fixture
def usual_recursion_limit() -> Iterator[None]:
    """Python's own: Hypothesis raises it, and so may what other tests import."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1_000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("value", ["1" * 4_301, "[" * 500 + "]" * 500], ids=["digits", "brackets"])
def test_a_value_that_python_cannot_hold_is_an_error_that_the_policy_reads(
    name: str, value: str, usual_recursion_limit: None
) -> None:
    stage = stage_of(name)
    text = stage.write(CASES[0])
    turn = stage.read(stage.writer.encode(text.replace('"red shoes"', value)))
    brackets = value.startswith("[")
    for call in executed(turn):
        # Not too deep for all readers; and a text where arguments have no quotes.
        assert '"red shoes"' not in text or (brackets and value in call.arguments_json)
    if '"red shoes"' in text and (not brackets or name == "Apertus"):
        [error] = turn.items
        assert isinstance(error, ParseError) and not turn.done
