"""Every row of a source is trained on, evaluated on, or dropped for one reason; and the split holds
as the data grow."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_reading.data.entries import DataError, Prepared, Reason
from flotilla_reading.data.preparation import Wishes, prepare
from flotilla_reading.data.quarantine import Rule
from flotilla_reading.data.selection import Selection
from flotilla_reading.data.split import SplitRules, order_of
from tests.reading.data.made_tasks import SIZES, Row, keep, keys_of, make_row, make_rows, to_rows
from tests.support.examples import examples

RULES = SplitRules(Fraction(1, 5), least=2, most=8)
READS = "def v(env): return env.db('seed')"
# Rows with every kind of fault, next to sound ones; few keys, so that some are repeated.
ROWS = st.lists(
    st.builds(
        make_row,
        st.integers(0, 30).map(lambda n: f"key-{n}"),
        st.sampled_from(["booking", "shop"]),
    ).flatmap(
        lambda row: st.sampled_from(
            [
                row,
                {**row, "env_id": f"env-of-{row['key']}"},
                {**row, "prompt": ""},
                {"task": "none"},
                7,
            ]
        )
    ),
    max_size=40,
)


def prepared(rows: Iterable[Any], **wishes: Any) -> Prepared:
    wanted: dict[str, Any] = {"split": RULES, **wishes}
    return prepare(to_rows(rows), Wishes(**wanted))


def reasons(result: Prepared) -> dict[str, str]:
    return {each.key: each.reason.value for each in result.dropped}


def rule(key: str = "", pattern: str = "") -> Rule:
    return Rule(key, pattern, "it has no solution", "2026-11-28", "run 7")


@given(ROWS, st.none() | st.integers(1, 20), st.booleans())
@settings(max_examples=examples(200), deadline=None)
def test_every_row_is_accounted_for_exactly_once(
    rows: list[Any], max_tasks: int | None, held: bool
) -> None:
    envs = {row["env_id"] for row in rows if isinstance(row, dict) and row.get("prompt")}
    wishes = Wishes(
        Selection(max_tasks=max_tasks),
        replace(RULES, held_out=tuple(sorted(envs)[:1]) if held else (), max_eval=3),
        quarantine=[rule(pattern="key-1*")],
    )
    read = to_rows(rows)
    try:
        result = prepare(read, wishes)
    except DataError as error:
        assert "and differ" in str(error) or "has no environment" in str(error)
        return
    places = [each.place for part in (result.train, result.eval, result.dropped) for each in part]
    assert sorted(places) == sorted(row.place for row in read)
    assert result.rows == len(rows)
    assert not keys_of(result.train) & keys_of(result.eval)
    assert not {e.question for e in result.train} & {e.question for e in result.eval}


@given(SIZES, st.randoms())
@settings(max_examples=examples(100), deadline=None)
def test_the_order_of_the_file_decides_nothing(sizes: dict[str, int], random: Any) -> None:
    rows = make_rows(sizes)
    shuffled = random.sample(rows, len(rows))
    wishes = {"selection": Selection(max_tasks=40), "max_env_share": Fraction(1)}
    first, second = prepared(rows, **wishes), prepared(shuffled, **wishes)
    assert [e.key for e in first.train] == [e.key for e in second.train]
    assert [e.key for e in first.eval] == [e.key for e in second.eval]


@given(SIZES, SIZES)
@settings(max_examples=examples(300), deadline=None)
def test_as_the_data_grow_a_task_leaves_evaluation_only_for_a_new_one(
    sizes: dict[str, int], growth: dict[str, int]
) -> None:
    """Of the tasks that were there before, those that are evaluated on are the first of an order
    that stays. So within an environment tasks move one way only: into evaluation while its exact
    number grows, and out of it one for each new task that comes before them."""
    old = make_rows(sizes)
    new = [make_row(f"new-{row['key']}", row["env_id"]) for row in make_rows(growth)]
    before, after = prepared(old), prepared(old + new)
    for env in sizes:
        was = {entry.key for entry in before.eval if entry.env_key == env}
        now = {entry.key for entry in after.eval if entry.env_key == env}
        came = {key for key in now if key.startswith("new-")}
        stayed = now - came
        assert was <= stayed or stayed <= was
        assert len(was - stayed) <= len(came)
        if len(now) == len(was):
            assert not stayed - was, "none moves into evaluation unless the number grows"
        if not came:
            assert was <= now, "none leaves unless a new one has come before it"


@given(SIZES)
@settings(max_examples=examples(100), deadline=None)
def test_an_environment_that_is_added_moves_no_task_of_the_others(sizes: dict[str, int]) -> None:
    before = prepared(make_rows(sizes))
    after = prepared(make_rows({**sizes, "added": 50}))
    assert keys_of(before.eval) == {e.key for e in after.eval if e.env_key != "added"}


@given(SIZES, SIZES)
@settings(max_examples=examples(100), deadline=None)
def test_numbers_of_evaluated_tasks_are_exact(
    sizes: dict[str, int], growth: dict[str, int]
) -> None:
    result = prepared(make_rows(sizes))
    counts = Counter(entry.env_key for entry in result.eval)
    assert {env: counts[env] for env in sizes} == {
        env: RULES.count_for(size) for env, size in sizes.items()
    }


@given(SIZES, st.integers(1, 30))
@settings(max_examples=examples(100), deadline=None)
def test_a_larger_max_tasks_keeps_what_a_smaller_one_takes(
    sizes: dict[str, int], most: int
) -> None:
    rows = make_rows(sizes)
    few, more = (prepared(rows, selection=Selection(max_tasks=count)) for count in (most, most + 5))
    kept = [keys_of(result.train) | keys_of(result.eval) for result in (few, more)]
    assert kept[0] <= kept[1]
    assert len(kept[0]) == min(most, len(rows))


@given(SIZES)
@settings(max_examples=examples(100), deadline=None)
def test_the_share_of_an_environment_holds_for_what_is_written(sizes: dict[str, int]) -> None:
    rows = [*make_rows(sizes), make_row("a", "first"), make_row("b", "second")]
    share = Fraction(1, 2)
    result = prepared(rows, max_env_share=share)
    counts = Counter(entry.env_key for entry in result.train)
    assert max(counts.values()) <= share * len(result.train)


def test_a_held_out_environment_is_evaluated_on_whole_and_never_trained_on() -> None:
    rows = make_rows({"shop": 30, "desk": 30})
    whole = prepared(rows, split=replace(RULES, held_out=("desk",)))
    assert Counter(e.env_key for e in whole.eval) == {"desk": 30, "shop": 6}
    limited = prepared(rows, split=replace(RULES, held_out=("desk",), max_eval=10))
    assert Counter(e.env_key for e in limited.eval) == {"desk": 5, "shop": 5}
    assert Counter(e.env_key for e in limited.train) == {"shop": 25}
    assert Counter(each.reason for each in limited.dropped) == {Reason.OVER_MAX_EVAL: 25}


def test_each_filter_drops_by_its_own_reason() -> None:
    rows = [
        make_row("kept", task_modality="tool_use", difficulty=2),
        make_row("screen", task_modality="computer_use", difficulty=2),
        make_row("desk", "desk", difficulty=2),
        make_row("hard", difficulty=3),
        make_row("unknown"),
    ]
    result = prepared(rows, selection=Selection("tool_use", ("shop",), ("1", "2")))
    assert keys_of(result.train) == {"kept"}
    assert reasons(result) == {
        "screen": "other_modality",
        "desk": "other_env",
        "hard": "other_difficulty",
        "unknown": "other_difficulty",
    }


def test_a_repeated_row_is_dropped_also_in_the_other_vocabulary() -> None:
    again = {"task_key": "a", "prompt": "Do a.", "env_key": "shop", "env_variables": {}}
    result = prepared([make_row("a"), again])
    (only,) = result.dropped
    assert (only.reason, only.detail) == (Reason.REPEATED, "the same as task 0")


def test_one_key_of_two_tasks_is_an_error_that_names_both() -> None:
    rows = [make_row("a"), make_row("b"), make_row("a", prompt="Do something else.")]
    with pytest.raises(DataError, match="task 0 and task 2 have the key 'a' and differ"):
        prepared(rows)
    result = prepared(rows, quarantine=[rule("a")])
    assert [each.reason for each in result.dropped] == [Reason.QUARANTINED] * 2


def test_a_question_that_is_evaluated_on_is_not_trained_on_under_another_key() -> None:
    rows = make_rows({"shop": 30})
    first = prepared(rows).eval[0]
    # The last of all, so it is not evaluated on.
    key = max((f"twin-{n}" for n in range(100)), key=order_of)
    twin: Row = {"key": key, "prompt": first.task.prompt, "env_id": "shop"}
    result = prepared([*rows, twin])
    (dropped,) = result.dropped
    assert (dropped.key, dropped.reason) == (key, Reason.EQUALS_EVAL)
    assert dropped.detail == f"asks the same as {first.key}"
    with pytest.raises(DataError, match=f"{key}.*equals_eval"):
        prepared([*rows, twin], strict=True)


def test_faulty_tasks_are_dropped_by_reason_or_refused_together() -> None:
    rows = [
        make_row("fine"),
        make_row("blank", prompt=" "),
        {"prompt": "x", "env_id": "shop"},
        make_row("soon", prompt="Book a table for tomorrow."),
        make_row("data", verifier_func=READS),
    ]
    result = prepared(rows)
    assert keys_of(result.train) == {"fine"}
    assert [(each.place, each.reason.value) for each in result.dropped] == [
        ("task 1", "invalid"),
        ("task 2", "invalid"),
        ("task 3", "relative_date"),
        ("task 4", "no_data_key"),
    ]
    with pytest.raises(DataError) as caught:
        prepared(rows, strict=True)
    assert "--strict: 4 tasks have faults" in str(caught.value)
    assert "task 1 (blank): invalid: needs a non-empty string 'prompt'" in str(caught.value)


def test_faults_of_tasks_that_are_not_wanted_are_no_errors() -> None:
    rows = [make_row("fine"), make_row("soon", "desk", prompt="Book a table for tomorrow.")]
    result = prepared(rows, strict=True, selection=Selection(envs=("shop",)))
    assert reasons(result) == {"soon": "other_env"}


def test_a_rule_counts_the_rows_that_it_matches_also_those_that_are_no_tasks() -> None:
    rows = [make_row("a-1"), make_row("a-2", prompt=""), make_row("b")]
    rules = [rule(pattern="a-*"), rule("a-1"), rule("nowhere")]
    result = prepared(rows, quarantine=rules, strict=True)
    assert result.matches == [2, 1, 0]
    assert reasons(result) == {"a-1": "quarantined", "a-2": "quarantined"}
    assert result.dropped[0].detail == "pattern 'a-*': it has no solution"


def test_an_environment_that_the_source_lacks_is_an_error_with_those_that_it_has() -> None:
    rows = make_rows({"shop": 1, "desk": 1})
    with pytest.raises(DataError, match=r"--env: .* no environment 'shp'; did you mean 'shop'"):
        prepared(rows, selection=Selection(envs=("shp",)))
    with pytest.raises(DataError, match=r"--held-out: .* it has desk, shop"):
        prepared(rows, split=replace(RULES, held_out=("elsewhere",)))


@settings(max_examples=examples(100))
@given(SIZES, SIZES, st.integers(0, 10))
def test_a_kept_split_holds_however_the_data_change(
    before: dict[str, int], after: dict[str, int], most: int
) -> None:
    old = prepared(make_rows(before))
    rules = SplitRules(Fraction(1, 10), 1, most)
    found = prepared(make_rows(after), split=rules, kept=keep(old))
    assert not keys_of(old.eval) & keys_of(found.train)
    assert not keys_of(old.train) & keys_of(found.eval)
    assert found.rows == sum(after.values())
    for env, size in after.items():
        kept = sum(e.env_key == env and e.key in keys_of(old.eval) for e in found.eval)
        number = sum(entry.env_key == env for entry in found.eval)
        assert number <= max(kept, rules.count_for(size))


def test_a_task_under_another_key_stays_where_its_question_was() -> None:
    rows = make_rows({"shop": 60})
    old = prepare(to_rows(rows), Wishes())
    renamed = [{**row, "key": f"new-{row['key']}"} for row in rows]
    found = prepare(to_rows(renamed), Wishes(kept=keep(old)))
    assert keys_of(found.eval) == {f"new-{key}" for key in keys_of(old.eval)}
    assert keys_of(prepare(to_rows(renamed), Wishes()).eval) != keys_of(found.eval)


def test_a_kept_split_refuses_rules_that_would_break_it() -> None:
    rows = make_rows({"shop": 60, "desk": 60})
    old = keep(prepare(to_rows(rows), Wishes()))
    with pytest.raises(DataError, match="--held-out desk: the split to keep, old, trains on 54"):
        prepare(to_rows(rows), Wishes(split=SplitRules(held_out=("desk",)), kept=old))
    with pytest.raises(DataError, match="--max-eval 11: the split to keep evaluates on 12"):
        prepare(to_rows(rows), Wishes(split=SplitRules(max_eval=11), kept=old))
    twelve = prepare(to_rows(rows), Wishes(split=SplitRules(max_eval=12), kept=old))
    assert len(twelve.eval) == 12
