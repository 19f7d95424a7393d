"""The user's own file of Fleet's booking tasks against the app; skipped without one."""

import contextlib
import io
import json
import sqlite3
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from flotilla_common.tasks.task_format import parse_task
from flotilla_env_gateway.grading.printed_checks import read_printed_checks
from flotilla_env_gateway.ports import QueryError, Rows, SqlValue, Verification
from flotilla_env_gateway.verify.verifier_globals import (
    Environment,
    StatementError,
    verifier_globals,
    without_fleet,
)
from flotilla_env_gateway.verify.verifier_pool import VerifierPool
from flotilla_env_gateway.verify.verifier_source import find_verifier
from flotilla_environments.api import Instance
from tests.environments.fleet_booking.solutions.site import Site
from tests.environments.fleet_booking.task_file import (
    DRAWN_REFERENCE,
    OTHER_USER,
    SOLUTIONS,
    TASKS,
    Task,
    needs_tasks,
    open_task,
)

pytestmark = needs_tasks
each_task = pytest.mark.parametrize("short", sorted(TASKS) or ["none"])
each_solved = pytest.mark.parametrize("short", sorted(SOLUTIONS.keys() & TASKS) or ["none"])


def grade(task: Task, instance: Instance) -> tuple[Any, str]:
    """The gateway's dialect, in this process: (result, what was printed)."""

    def run(db: str, sql: str, args: Sequence[Any]) -> tuple[list[str], list[tuple[Any, ...]]]:
        try:
            rows = instance.query(cast(Any, db), sql, args)
        except sqlite3.Error as error:
            raise StatementError(str(error)) from error
        return rows.columns, rows.rows

    source = task["verifier_func"]
    names, printed = verifier_globals(), io.StringIO()
    exec(compile(without_fleet(source), "<verifier>", "exec"), names)
    verify = cast(Callable[..., Any], names[find_verifier(source).name])
    with contextlib.redirect_stdout(printed):
        result = verify(Environment(run), final_answer="done")
    return result, printed.getvalue()


def grade_by_sdk(task: Task, instance: Instance, folder: Path) -> tuple[Any, str]:
    """Fleet's own engine, over files."""
    with warnings.catch_warnings():
        # The SDK declares its models in pydantic's old way, and takes seconds to import.
        warnings.simplefilter("ignore", DeprecationWarning)
        from fleet.verifiers.local_executor import execute_verifier_local
    paths = {name: folder / f"{name}.sqlite" for name in ("seed", "current")}
    paths["seed"].write_bytes(instance.snapshot("seed"))
    paths["current"].write_bytes(instance.snapshot("current"))
    answer = execute_verifier_local(
        task["verifier_func"], str(paths["seed"]), str(paths["current"]), "done"
    )
    assert answer["error"] is None
    return answer["result"], answer["stdout"]


def verification(task: Task) -> Verification:
    instance = open_task(task)

    async def query(db: str, sql: str, args: Sequence[SqlValue]) -> Rows:
        raise QueryError("the snapshot answers")

    async def snapshot(db: str) -> bytes | None:
        return instance.snapshot(cast(Any, db))

    source = task["verifier_func"]
    return Verification(
        source,
        find_verifier(source).name,
        query,
        snapshot,
        arguments={"final_answer": "done"},
        trusted=True,
    )


def test_every_task_loads_in_both_loaders() -> None:
    assert len(TASKS) >= 70
    for task in TASKS.values():
        parsed = parse_task(json.dumps(task))
        assert parsed.env_key == "fleet_booking"
        assert parsed.verifier is not None
        assert parsed.current_date


@each_task
def test_an_untouched_state_fails_with_a_reason_as_in_fleets_engine(
    short: str, tmp_path: Path
) -> None:
    instance = open_task(TASKS[short])
    result, printed = grade(TASKS[short], instance)
    assert result == 0
    assert read_printed_checks(printed).failed, "a failing verifier prints what failed"
    assert (result, printed) == grade_by_sdk(TASKS[short], instance, tmp_path)


@each_solved
def test_a_scripted_solution_passes_in_both_engines(short: str, tmp_path: Path) -> None:
    instance = open_task(TASKS[short])
    SOLUTIONS[short](Site(instance.call, TASKS[short]["prompt"]))
    result, printed = grade(TASKS[short], instance)
    if short in DRAWN_REFERENCE:
        assert result == 0
        (failed,) = read_printed_checks(printed).failed
        assert "booking_reference" in failed
    else:
        assert result == 1, printed
    by_sdk = grade_by_sdk(TASKS[short], instance, tmp_path)
    assert result == by_sdk[0]
    assert read_printed_checks(printed).passed == read_printed_checks(by_sdk[1]).passed


@each_solved
def test_both_engines_agree_on_what_else_was_changed(short: str, tmp_path: Path) -> None:
    instance = open_task(TASKS[short])
    site = Site(instance.call, TASKS[short]["prompt"])
    SOLUTIONS[short](site)
    site.new_list("Not asked for")
    site.do("update_profile", address="1 Wrong Street")
    instance.query("current", "delete from reviews where id < 9", read_only=False)
    assert grade(TASKS[short], instance)[0] == grade_by_sdk(TASKS[short], instance, tmp_path)[0]


async def test_the_gateways_verifier_processes_run_every_verifier() -> None:
    pool = VerifierPool(size=1, memory_bytes=2**30)
    try:
        for task in TASKS.values():
            execution = await pool.run_verifier(verification(task), timeout_s=20)
            assert (execution.error, execution.result) == (None, 0)
    finally:
        await pool.close()


def test_most_tasks_have_a_solution() -> None:
    unsolved = TASKS.keys() - SOLUTIONS
    assert unsolved <= OTHER_USER
    assert len(SOLUTIONS.keys() - DRAWN_REFERENCE) >= 60
