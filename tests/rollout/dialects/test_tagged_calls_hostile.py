"""Any text of a policy is parsed quickly: the event loop serves many other episodes."""

import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flotilla_common.text.parsing import ASIDE_BYTES
from flotilla_rollout.dialects.tagged_calls import MOST_CALLS, parse_turn
from flotilla_rollout.dialects.turns import ParseError, ToolCall, Turn
from tests.support.examples import examples

# For a text parsed on the event loop; longer ones take a thread and proportional time.
MOST_S = 0.05
SUPPRESSED = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example)
# More than an answer of 57,000 tokens contains.
CHARACTERS = 2**18
UNITS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "<done>",
        "<tool_call>{",
        "<tool_call>[",
    ),
    *('<tool_call>["', '<tool_call>"', '"<tool_call>[",', '{"name":"a","arguments":{}}', '{"a":'),
    *(
        "[",
        "[],",
        '"',
        '\\"',
        "\\",
        "\\ud800",
        "\ud800",
        "9" * 4299 + ",",
        "1e999,",
        "NaN,",
        " ",
        "\n",
    ),
]
TEXTS = st.lists(
    st.tuples(st.sampled_from(UNITS) | st.text(max_size=6), st.integers(0, 2_000)), max_size=6
).map(lambda parts: "".join(unit * count for unit, count in parts)[:CHARACTERS])


def parsed_at_once(text: str, *, thinking: bool) -> Turn:
    """Fail if it takes longer twice: a page fault or a garbage collection does not repeat."""
    took: list[float] = []
    for _ in range(3):
        began = time.thread_time()
        turn = parse_turn(text, thinking=thinking)
        took.append(time.thread_time() - began)
        if took[-1] < MOST_S * max(1.0, len(text) / ASIDE_BYTES):
            return turn
    raise AssertionError(f"{min(took) * 1000:.0f} ms for {text[:100]!r}")


@pytest.mark.parametrize("unit", UNITS, ids=ascii)
def test_any_unit_repeated_is_parsed_at_once(unit: str) -> None:
    text = (unit * (CHARACTERS // len(unit)))[:CHARACTERS]
    for before in ("", "<tool_call>", '<tool_call>["', '<tool_call>{"name":"a","arguments":'):
        parsed_at_once(before + text, thinking=False)


def test_calls_beyond_a_limit_are_one_error_that_the_policy_reads() -> None:
    call = '<tool_call>{"name": "a", "arguments": {}}</tool_call>'
    turn = parse_turn(call * (MOST_CALLS + 5) + "that is all <done>")
    assert [type(item) for item in turn.items] == [ToolCall] * MOST_CALLS + [ParseError]
    assert turn.done
    assert parse_turn(call * (MOST_CALLS + 5) + "</think>" + call).items == (ToolCall("a", "{}"),)


@given(TEXTS, st.booleans())
@settings(max_examples=examples(50), deadline=None, suppress_health_check=SUPPRESSED)
def test_any_text_is_parsed_at_once(text: str, thinking: bool) -> None:
    parsed_at_once(text, thinking=thinking)


@pytest.mark.slow
@given(TEXTS, st.booleans())
@settings(max_examples=10_000, deadline=None, suppress_health_check=SUPPRESSED)
def test_ten_thousand_texts_are_parsed_at_once(text: str, thinking: bool) -> None:
    parsed_at_once(text, thinking=thinking)
