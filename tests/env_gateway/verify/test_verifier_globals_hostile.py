"""Names and values that a policy put into an environment, which no verifier foresaw: they make no
zero no grade."""

import asyncio
import json
import sqlite3
from collections.abc import Sequence
from typing import Any

import pytest

from flotilla_env_gateway.ports import CallResult, Execution, Text, Verification
from flotilla_env_gateway.verify.protocol import LINE_BYTES
from flotilla_env_gateway.verify.verifier_globals import Database
from flotilla_env_gateway.verify.verifier_pool import VerifierPool
from flotilla_env_gateway.verify.verifier_source import find_verifier
from tests.support.fake_environments import FakeGrader, ScriptedBackend
from tests.support.fake_gateway import open_spec, opened, running

SEED = "CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT); INSERT INTO notes VALUES (1, 'a');"
NAMES = ["x]y", "x`y", 'x"y', "x] WHERE 0 --", "x' y", "[x]", ""]


def database(change: str = "") -> sqlite3.Connection:
    made = sqlite3.connect(":memory:")
    made.executescript(SEED + change)
    return made


def shown(name: str, of: sqlite3.Connection) -> Database:
    def run(_: str, sql: str, args: Sequence[Any]) -> tuple[list[str], list[Any]]:
        cursor = of.execute(sql, tuple(args))
        return [column[0] for column in cursor.description], cursor.fetchall()

    return Database(name, run)


@pytest.mark.parametrize("name", NAMES)
def test_a_table_of_any_name_is_a_change_and_no_failure(name: str) -> None:
    quoted = '"' + name.replace('"', '""') + '"'
    made = database(
        f"CREATE TABLE {quoted} (id INT, {quoted} INT PRIMARY KEY);"
        f"INSERT INTO {quoted} VALUES (1, 2);"
    )
    before, after = shown("seed", database()), shown("current", made)
    listed = {"table": name, "pk": 2, "field": None, "after": "__added__"}
    for allowed in ([], [{"table": "notes", "pk": 1, "field": "text", "after": "b"}]):
        with pytest.raises(AssertionError, match="Unexpected database changes"):
            before.diff(after).expect_only(allowed)
    before.diff(after).expect_only([listed])
    assert [change.pk for change in before.diff(after).changes] == [2]


async def executed(source: str, change: str = "", **arguments: str) -> Execution:
    content = database(change).serialize()

    async def snapshot(db: str) -> bytes:
        return content

    def query(db: str, sql: str, args: object) -> Any:
        raise AssertionError("there is a copy")

    function = find_verifier(source).name
    requests = Verification(source, function, query, snapshot, arguments, trusted=True)
    pool = VerifierPool(size=1, memory_bytes=2**29)
    try:
        return await pool.run_verifier(requests, timeout_s=20.0)
    finally:
        await pool.close()


async def test_stored_octets_that_are_no_text_are_read_and_distinguished() -> None:
    source = """
def verify(env):
    texts = [row["text"] for row in env.db().table("notes").all()]
    print(texts)
    return len(set(texts))
"""
    change = "INSERT INTO notes VALUES (2, CAST(X'FF' AS TEXT)), (3, CAST(X'FE' AS TEXT));"
    execution = await executed(source, change)
    assert (execution.result, execution.error) == (3, None)


async def test_checks_that_repeat_a_long_answer_fit_into_one_message() -> None:
    source = """
def verify(env, final_answer):
    print(final_answer * 2000)
    checks = [final_answer] * 200
    return {"score": 0, "passed": checks, "failed": checks}
"""
    answer = "\U0001f600" * 500
    assert len(json.dumps(answer)) * 400 + 12 * 2**16 < LINE_BYTES
    execution = await executed(source, final_answer=answer)
    assert (execution.result, execution.error) == (0, None)
    assert execution.report is not None and execution.report.failed == (answer,) * 200
    assert execution.stdout == answer[0] * 2**16


async def test_a_grade_waits_until_what_was_shown_last_is_noted() -> None:
    backend, grader, requests = ScriptedBackend(), FakeGrader(), asyncio.Event()
    grader.executions.append(Execution(result=0, stdout="JUDGE ERROR: x"))

    async def answer(name: str, arguments: Any) -> CallResult:
        requests.set()
        # So long that it is read in a thread.
        return CallResult((Text(f"{'judge ' * 2**18}JUDGE ERROR: x"),))

    backend.hook = answer
    async with running(backend, grader) as gateway:
        session = await opened(gateway, open_spec())
        call = asyncio.create_task(gateway.call_tool(session, 0, "add", '{"by": 1}', 5.0))
        await requests.wait()
        grade = await gateway.grade_episode(session, "done", None, 30.0)
        await call
    assert (grade.reward, grade.suspicion) == (0.0, "JUDGE ERROR: x")
