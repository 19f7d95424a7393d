"""What two plays have in common is expected, and nothing that names the present."""

from datetime import UTC, datetime

import pytest

from flotilla_reading.own_tools.observations import expect, is_met, observe

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("one\ntwo", "two\none", [["one"], ["two"]]),
        ("id 17 of Ann", "id 18 of Ann", [["id ", " of Ann"]]),
        ("on 2026-11-30T11:00Z", "on 2026-11-30T11:00Z", [["on ", ""]]),
        ("at 1796040000 exactly", "at 1796040000 exactly", [["at ", " exactly"]]),
        ("due 2027-03-01", "due 2027-03-01", [["due 2027-03-01"]]),
    ],
)
def test_what_differs_or_names_the_present_is_a_gap(
    first: str, second: str, expected: list[list[str]]
) -> None:
    one, other = observe("ok", first), observe("ok", second)
    agree, pattern = expect(one, other, NOW)
    assert agree
    assert pattern is not None
    assert sorted(pattern) == sorted(expected)
    assert is_met(pattern, one)
    assert is_met(pattern, other)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("one", "one\ntwo"),
        ("17", "18"),
        ("modified Mon Nov 30 2026", "modified Mon Nov 30 2026"),
        ("/tmp/flotilla-episodes-x1/files", "/tmp/flotilla-episodes-x1/files"),
        ("[image/png, 9 bytes, 3x3]", "[image/png, 9 bytes, 3x3]"),
        ("x" * 30_000, "x" * 30_000),
    ],
)
def test_what_no_pattern_holds_is_not_expected(first: str, second: str) -> None:
    assert expect(observe("ok", first), observe("ok", second), NOW) == (False, None)


def test_a_call_that_fails_both_times_is_expected_to_fail() -> None:
    gone = observe("tool_error", "no such file")
    assert expect(gone, gone, NOW) == (True, None)
    assert is_met(None, gone)
    assert not is_met(None, observe("ok", "here"))
    assert expect(gone, observe("ok", "here"), NOW) == (False, None)
