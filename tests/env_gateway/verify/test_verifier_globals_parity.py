"""Our dialect against Fleet's own engines, on small databases: same verdicts, same rows.

The SDK has two engines, and they differ in little. Over the wire it reads through `SQLiteResource`,
and that is what grades on Fleet; for files it has `DatabaseSnapshot`. We follow the first where
they differ: an empty list of changes then still ignores the ignored fields, and equal JSON is no
change; and a row that only got another rowid is as it was.
"""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flotilla_env_gateway.verify import verifier_globals
from tests.env_gateway.verify.fleet_engines import (
    COLUMNS,
    JSON,
    PLAIN,
    ignores,
    local_executor,
    opened,
    outcome,
    pairs,
    specs,
    states,
)
from tests.support.examples import examples

RELAXED = settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.mark.parametrize("method", ["expect_only", "expect_only_v2", "expect_exactly"])
@RELAXED
@given(data=st.data())
def test_verdicts_are_those_of_the_engine_that_grades_on_fleet(
    tmp_path: Path, method: str, data: st.DataObject
) -> None:
    values = PLAIN | JSON
    before, after = data.draw(pairs(values))
    changes = data.draw(st.lists(specs(values), max_size=4))
    ignore = data.draw(ignores())
    with opened(tmp_path, before, after) as engines:
        ours, remote, _ = engines.verdicts(method, changes, ignore)
    assert ours == remote


@pytest.mark.parametrize("method", ["expect_only", "expect_only_v2", "expect_exactly"])
@RELAXED
@given(data=st.data())
def test_verdicts_are_those_of_the_local_engine_where_fleets_two_agree(
    tmp_path: Path, method: str, data: st.DataObject
) -> None:
    before, after = data.draw(pairs(PLAIN))
    changes = data.draw(st.lists(specs(PLAIN), max_size=4))
    with opened(tmp_path, before, after) as engines:
        ours, _, locally = engines.verdicts(method, changes, {})
    assert ours == locally


@RELAXED
@given(data=st.data())
def test_what_may_and_may_not_change_is_judged_alike(tmp_path: Path, data: st.DataObject) -> None:
    before, after = data.draw(pairs(PLAIN))
    columns = st.sampled_from([(t, name) for t in COLUMNS for name in (*COLUMNS[t], None)])
    lists = st.lists(columns.map(lambda pair: {"table": pair[0], "field": pair[1]}), max_size=3)
    rules = {"allow": data.draw(lists), "forbid": data.draw(lists)}
    with opened(tmp_path, before, after) as engines:
        ours = engines.ours[0].diff(engines.ours[1])
        theirs = engines.local[0].diff(engines.local[1])
        assert outcome(lambda: ours.expect(**rules)) == outcome(lambda: theirs.expect(**rules))


@RELAXED
@given(data=st.data())
def test_changes_are_those_of_diff_dbs(tmp_path: Path, data: st.DataObject) -> None:
    before, after = data.draw(pairs(PLAIN))
    with opened(tmp_path, before, after) as engines:
        theirs = local_executor.diff_dbs(engines.paths[0], engines.paths[1])["diff"]
        found = {(c.kind, c.table, c.pk) for c in engines.ours[0].diff(engines.ours[1]).changes}
    kinds = {"added_rows": "insert", "removed_rows": "delete", "modified_rows": "modify"}
    assert found == {
        (kind, table, row["row_id"])
        for table, report in theirs.items()
        for name, kind in kinds.items()
        for row in report[name]
    }


CONDITIONS = ["eq", "neq", "gt", "gte", "lt", "lte"]


@st.composite
def steps(draw: st.DrawFn, table: str) -> tuple[str, tuple[Any, ...]]:
    column = draw(st.sampled_from([*COLUMNS[table], "nowhere"]))
    kind = draw(
        st.sampled_from([*CONDITIONS, "in_", "not_in", "null", "ilike", "sort", "limit", "select"])
    )
    if kind in CONDITIONS:
        return kind, (column, draw(PLAIN))
    if kind in ("in_", "not_in"):
        return kind, (column, draw(st.lists(PLAIN, max_size=3)))
    if kind == "null":
        return draw(st.sampled_from(["is_null", "not_null"])), (column,)
    if kind == "ilike":
        return kind, (column, draw(st.sampled_from(["a%", "%B%", "_", ""])))
    if kind == "sort":
        return kind, (column, draw(st.booleans()))
    return (kind, (draw(st.integers(0, 3)),)) if kind == "limit" else (kind, (column,))


def result(query: Any, chain: Sequence[tuple[str, tuple[Any, ...]]], end: str, *args: Any) -> Any:
    """Return the result of a chain of calls, or the kind of its error."""
    try:
        for name, arguments in chain:
            query = getattr(query, name)(*arguments)
        found = getattr(query, end)(*args)
    except AssertionError:
        return "fails"
    except sqlite3.Error:
        return "error"
    if end == "count":
        return int(found)
    return found if end in ("all", "first") else "passes"


@RELAXED
@given(data=st.data())
def test_queries_find_what_fleets_find(tmp_path: Path, data: st.DataObject) -> None:
    table = data.draw(st.sampled_from(sorted(COLUMNS)))
    state = data.draw(states(PLAIN | JSON))
    chain = data.draw(st.lists(steps(table), max_size=4))
    with opened(tmp_path, state, state) as engines:
        for end in ("all", "first", "count", "assert_exists", "assert_none"):
            ours = result(engines.ours[0].table(table), chain, end)
            assert ours == result(engines.local[0].table(table), chain, end), end
        column, value = COLUMNS[table][-1], data.draw(PLAIN)
        ours = result(engines.ours[0].table(table), chain, "assert_eq", column, value)
        assert ours == result(engines.local[0].table(table), chain, "assert_eq", column, value)


HELPERS = ["normalized_contains", "normalized_string_comparison", "contains_number"]
TEXTS = st.text(alphabet="aB1,.-! \n{}é0") | st.sampled_from(["1,200", "-3.5", "1e3", "nan"])


@pytest.mark.parametrize("name", HELPERS)
@given(st.data())
def test_text_helpers_answer_as_fleets(name: str, data: st.DataObject) -> None:
    ours, theirs = getattr(verifier_globals, name), getattr(local_executor, name)
    first = data.draw(TEXTS)
    second = data.draw(TEXTS if name == "contains_number" else TEXTS | st.lists(TEXTS, max_size=2))
    assert ours(first, second) == theirs(first, second)
    assert verifier_globals.extract_numbers(first) == local_executor.extract_numbers(first)


VERIFIERS = [
    "def v(env):\n    return env.db('seed').table('numbered').count().value\n",
    "def v(env):\n    env.db().expect_row('numbered', {'id': 1}, {'n': 0})\n    return 1\n",
    "def v(env):\n    env.db().expect_rows('numbered', {}, count=1, contains=[{'id': 1}])\n"
    "    return 1\n",
    "def v(env):\n    env.db().expect_absent_row('numbered', {'id': 1})\n    return 1\n",
    "@verifier(key='x')\ndef v(env, final_answer=None):\n"
    "    seed, current = env.db('seed'), env.db('current')\n"
    "    try:\n        seed.diff(current).expect_only_v2([])\n"
    "    except AssertionError:\n        print('changed')\n        return TASK_FAILED_SCORE\n"
    "    return TASK_SUCCESSFUL_SCORE\n",
    "from fleet import verifier\nimport fleet\ndef v(env):\n    return len(env.db().tables())\n",
    "def v(env):\n    return env.db('other')\n",
    "def v(env):\n    return env.db().table('nowhere').all()\n",
    "def v(env):\n    return 1 if env.db().table('numbered').eq('n', 0).first() else 0\n",
]


@pytest.mark.parametrize("source", VERIFIERS)
@settings(RELAXED, max_examples=8)
@given(data=st.data())
def test_whole_verifiers_end_alike(tmp_path: Path, source: str, data: st.DataObject) -> None:
    before, after = data.draw(pairs(PLAIN))
    with opened(tmp_path, before, after) as engines:
        theirs = local_executor.execute_verifier_local(source, *engines.paths)
        environment = verifier_globals.Environment(engines.run)
        names = verifier_globals.verifier_globals()
        exec(verifier_globals.without_fleet(source), names)
        try:
            value, failed = names["v"](environment), False
        except Exception:  # noqa: BLE001
            # Fleet's engine catches all of them too.
            value, failed = None, True
    assert failed == (not theirs["success"])
    assert value == theirs["result"]
