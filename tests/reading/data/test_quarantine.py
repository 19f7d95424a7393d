"""Rules of the quarantine: what they match, and what is wrong with one, by its line."""

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla_reading.data.entries import DataError
from flotilla_reading.data.quarantine import parse_rules

RULE = {"key": "a", "reason": "no solution", "date": "2026-11-28", "evidence": "run 7"}
PATTERN = {**{name: RULE[name] for name in RULE if name != "key"}, "pattern": "b-[0-9]*"}
PATH = Path("rules.jsonl")


def test_a_key_matches_itself_and_a_pattern_whole_keys() -> None:
    text = f"{json.dumps(RULE)}\n\n{json.dumps(PATTERN)}\n"
    one, many = parse_rules(text.encode(), PATH)
    assert [one.matches(key) for key in ("a", "A", "aa")] == [True, False, False]
    assert [many.matches(key) for key in ("b-1", "b-12x", "b-x", "ab-1")] == [
        *(True, True, False, False)
    ]
    assert one.to_dict() == RULE
    assert many.to_dict() == PATTERN


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": None}, "key must be a non-empty string"),
        ({"pattern": "a*"}, "a rule has either key or pattern"),
        ({"reson": "x"}, "unknown key 'reson'; did you mean 'reason'"),
        ({"reason": " "}, "reason must be a non-empty string"),
        ({"date": "yesterday"}, "date 'yesterday' is none, such as 2026-11-28"),
        ({"evidence": 7}, "evidence must be a non-empty string"),
    ],
)
def test_a_wrong_rule_is_named_by_its_line(changes: dict[str, Any], message: str) -> None:
    text = f"{json.dumps(RULE)}\n{json.dumps({**RULE, **changes})}\n"
    with pytest.raises(DataError) as caught:
        parse_rules(text.encode(), PATH)
    assert str(caught.value).startswith(f"rules.jsonl: line 2: {message}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected an object, got list"),
        ('{"key": "a", "key": "b"}', "the key 'key' is repeated"),
        ('{"reason": "x"}', "a rule has either key or pattern"),
        ('{"key": "a", "reason": "x", "date": "2026-11-28"}', "evidence is missing"),
    ],
)
def test_a_line_that_is_no_rule_is_refused(line: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_rules(line.encode(), PATH)
