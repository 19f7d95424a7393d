"""Which differences between two episodes show that they share state, and what is said of them."""

import tempfile
from dataclasses import replace
from typing import Any

import pytest

from flotilla_launcher.doctor.idle_comparison import (
    IdleView,
    describe_difference,
    may_differ,
    shares_state,
    suggest_isolation,
)

VIEW = IdleView(
    {"add": "Add.", "list": "List."},
    "episode ep-1 began",
    {"list": "[]", "count": "none"},
    0.0,
    ("ep-1",),
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"read_results": {"list": "[]"}}, ""),
        ({"tools": {"add": "Add.", "list": "All."}}, "the tools list differ"),
        ({"tools": {"list": "List.", "new": ""}}, "the tools add, new differ"),
        (
            {"first_observation": "episode ep-2 goes on"},
            "the first observation was 'episode * began', then 'episode * goes on'",
        ),
        (
            {"read_results": {"list": "[1]", "count": "one"}, "reward": 1.0},
            "count answered 'none', then 'one'; list answered '[]', then '[1]'; "
            "doing nothing earned 0, then 1",
        ),
    ],
)
def test_a_difference_is_described(changes: dict[str, Any], said: str) -> None:
    second = replace(VIEW, first_observation="episode ep-2 began", own_words=("ep-2",))
    assert describe_difference(VIEW, replace(second, **changes)) == said


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("at 2026-11-27T01:02:03.5Z", "at 2026-11-28 09:00:00+01:00"),
        ("at 01:02:03", "at 01:02:04"),
        ("since 1764205378", "since 1764205399.25"),
        ("id 9c4ed6c8-0000-4000-8000-9c4ed6c80001", "id 11111111-0000-4000-8000-9c4ed6c80002"),
        ("id 9c4ed6c89c4ed6c8", "id deadbeef00112233"),
        (f"in {tempfile.gettempdir()}/episode-1/x", f"in {tempfile.gettempdir()}/episode-2/x"),
    ],
)
def test_times_and_ids_and_scratch_folders_are_no_difference(old: str, new: str) -> None:
    first, second = (replace(VIEW, first_observation=text) for text in (old, new))
    assert describe_difference(first, second) == ""


@pytest.mark.parametrize(("old", "new"), [("3 notes", "4 notes"), ("on 2026-11-27", "on Monday")])
def test_counts_and_days_are_a_difference(old: str, new: str) -> None:
    first, second = (replace(VIEW, first_observation=text) for text in (old, new))
    assert describe_difference(first, second)


def test_a_long_text_is_quoted_where_it_differs() -> None:
    first, second = (replace(VIEW, first_observation="x" * 500 + text) for text in ("a", "b"))
    kept = "x" * 30
    said = f"the first observation was '...{kept}a', then '...{kept}b'"
    assert describe_difference(first, second) == said


@pytest.mark.parametrize(
    ("backend", "server", "words", "key"),
    [
        ("mcp", {"transport": "stdio"}, "outside the episode's folder", "shared_state = true"),
        ("mcp", {"transport": "http"}, "all episodes use one server", 'sessions = "stateless"'),
        ("mcp", {"transport": "http", "instances": True}, "from the task's data", ""),
        ("openenv", {}, "`reset`", ""),
        ("embedded", {}, "from the task's data", ""),
    ],
)
def test_the_likely_cause_is_that_of_the_backend(
    backend: str, server: dict[str, Any], words: str, key: str
) -> None:
    section = {"backends": {backend: server}, "servers": [server]}
    fix = suggest_isolation(section, backend)
    assert words in fix
    assert (key in fix and "env_gateway.servers" in fix) == bool(key)


@pytest.mark.parametrize(
    ("server", "shared", "different"),
    [
        ({"shared_state": True, "sessions": "stateful"}, True, True),
        ({"shared_state": False, "sessions": "stateless"}, False, True),
        ({"shared_state": False, "sessions": "stateful"}, False, False),
    ],
)
def test_sharing_is_what_the_spec_says(
    server: dict[str, Any], shared: bool, different: bool
) -> None:
    section: dict[str, Any] = {"backends": {}, "servers": [server]}
    assert (shares_state(section, "mcp"), may_differ(section, "mcp")) == (shared, different)
