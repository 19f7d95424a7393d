"""Verifiers in Fleet's dialect, run in worker processes."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from flotilla_env_gateway.grading.verdict import judge_execution
from flotilla_env_gateway.ports import (
    BackendError,
    Execution,
    QueryError,
    Rows,
    SqlValue,
    Verification,
)
from flotilla_env_gateway.verify.change_rules import IgnoreConfig
from flotilla_env_gateway.verify.protocol import MessageBudget, ProtocolError, parse_message
from flotilla_env_gateway.verify.verifier_globals import (
    Database,
    contains_number,
    extract_numbers,
    normalized_contains,
    normalized_string_comparison,
    without_fleet,
)
from flotilla_env_gateway.verify.verifier_pool import VerifierPool
from flotilla_env_gateway.verify.verifier_source import find_verifier

SEED = """
CREATE TABLE bookings (id INTEGER PRIMARY KEY, guest TEXT, hotel_id INT, extra TEXT);
INSERT INTO bookings VALUES (1, 'Ada', 7, '{"a": 1, "b": 2}'), (2, 'Bob', 8, NULL);
CREATE TABLE log (line TEXT);
"""
CHANGE = """
INSERT INTO bookings VALUES (3, 'Eve', 9, NULL);
UPDATE bookings SET hotel_id = 70 WHERE id = 1;
DELETE FROM bookings WHERE id = 2;
"""
INSERTED = {"table": "bookings", "pk": 3, "type": "insert"}
MODIFIED = {"table": "bookings", "pk": "1", "type": "modify"}
DELETED = {"table": "bookings", "pk": 2, "type": "delete"}


def databases(change: str = CHANGE) -> dict[str, sqlite3.Connection]:
    result = {name: sqlite3.connect(":memory:") for name in ("seed", "current")}
    for database in result.values():
        database.executescript(SEED)
    result["current"].executescript(change)
    return result


@pytest.fixture
def dbs() -> Any:
    connections = databases()
    yield {name: Database(name, direct(connections)) for name in connections}
    for connection in connections.values():
        connection.close()


def direct(connections: dict[str, sqlite3.Connection]) -> Any:
    def run(db: str, sql: str, args: Sequence[Any]) -> tuple[list[str], list[Any]]:
        cursor = connections[db].execute(sql, tuple(args))
        return [c[0] for c in cursor.description], cursor.fetchall()

    return run


@asynccontextmanager
async def pool(size: int = 1) -> AsyncGenerator[VerifierPool]:
    workers = VerifierPool(size=size, memory_bytes=2**29)
    await workers.start_workers()
    try:
        yield workers
    finally:
        await workers.close()


async def run(
    workers: VerifierPool,
    source: str,
    *,
    snapshots: bool = True,
    timeout_s: float = 5.0,
    **arguments: str | None,
) -> Execution:
    connections = databases()
    for connection in connections.values():
        connection.execute("PRAGMA query_only = 1")

    async def query(db: str, sql: str, args: Sequence[SqlValue]) -> Rows:
        try:
            cursor = connections[db].execute(sql, tuple(args))
        except sqlite3.Error as error:
            raise QueryError(str(error)) from error
        return Rows(tuple(c[0] for c in cursor.description), cursor.fetchall())

    async def snapshot(db: str) -> bytes | None:
        return connections[db].serialize() if snapshots else None

    verification = Verification(
        source, find_verifier(source).name, query, snapshot, arguments, trusted=True
    )
    try:
        return await workers.run_verifier(verification, timeout_s=timeout_s)
    finally:
        for connection in connections.values():
            connection.close()


FULL = """
from fleet import verifier, Environment
import fleet.verifiers

@verifier(key="x")
def validate_task(env: Environment, final_answer: str | None = None) -> int:
    errors, successes = [], []
    env.instance.load()
    seed, current = env.db("seed"), env.db("current")
    before = {row["id"] for row in seed.table("bookings").select("id").all()}
    new = [row for row in current.table("bookings").all() if row["id"] not in before]
    successes.append(f"[C] {len(new)} new")
    assert current.table("bookings").in_("guest", ["Ada", "Eve"]).count() == 2
    assert current.table("bookings").neq("id", 1).first()["guest"] == "Eve"
    assert current.table("bookings").like("guest", "a%").first()["id"] == 1
    assert current.query("SELECT count(*) FROM bookings").rows == [[2]]
    assert not current.exec("DELETE FROM bookings").success
    assert normalized_contains("E-V-E", final_answer)
    seed.diff(current, IgnoreConfig(tables={"log"})).expect_only_v2([
        {"table": "bookings", "pk": 3, "type": "insert",
         "fields": [("id", 3), ("guest", "Eve"), ("hotel_id", ...), ("extra", None)]},
        {"table": "bookings", "pk": 1, "type": "modify",
         "resulting_fields": [("hotel_id", 70)], "no_other_changes": True},
        {"table": "bookings", "pk": 2, "type": "delete"},
    ])
    errors.append("[X] for show")
    print(f">>> ERROR_ACCUMULATOR >>>\\n{errors}\\n<<< ERROR_ACCUMULATOR <<<")
    print(f">>> SUCCESS_ACCUMULATOR >>>\\n{successes}\\n<<< SUCCESS_ACCUMULATOR <<<")
    return TASK_SUCCESSFUL_SCORE
"""


@pytest.mark.parametrize("snapshots", [True, False])
async def test_a_verifier_of_fleets_dialect_runs_in_a_worker(snapshots: bool) -> None:
    async with pool() as workers:
        execution = await run(workers, FULL, snapshots=snapshots, final_answer="it is Eve")
    grade = judge_execution(execution, attempts=1)
    assert (grade.reward, grade.detail) == (1.0, "")
    assert (grade.checks_passed, grade.checks_failed) == (("[C] 1 new",), ("[X] for show",))
    assert grade.partial_reward is None


async def test_questions_go_to_the_gateway_where_there_is_no_snapshot() -> None:
    source = """
def verify(env):
    env.db("seed").diff(env.db("current"), IgnoreConfig(tables={"bookings"})).expect_only([])
    return env.db().table("bookings").eq("guest", "Eve").count()
"""
    async with pool() as workers:
        assert (await run(workers, source, snapshots=False)).result == 1


async def test_more_rows_than_sqlite_sorts_in_its_cache_are_sorted_all_the_same() -> None:
    source = """
def verify(env):
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 60000)"
    rows = "SELECT i FROM n ORDER BY hex(randomblob(30)) LIMIT -1 OFFSET 0"
    statement = f"{numbers} SELECT max(i) FROM ({rows})"
    return env.db().select(statement)[0]["max(i)"]
"""
    async with pool() as workers:
        execution = await run(workers, source)
    assert execution.result == 60_000, execution


async def test_what_a_verifier_raises_is_reported_with_its_line_and_the_worker_continues() -> None:
    raising = "def verify(env):\n    print('before')\n    raise SystemExit('no')\n"
    async with pool() as workers:
        execution = await run(workers, raising)
        assert execution.error == "SystemExit: no (line 3 of the verifier)"
        assert execution.stdout == "before\n"
        assert not execution.retryable
        assert (await run(workers, "def verify(env):\n    return 0.5\n")).result == 0.5


async def test_a_verifier_that_never_ends_is_killed_and_replaced() -> None:
    hanging = "def verify(env):\n    while True:\n        try:\n            while True: pass\n"
    hanging += "        except BaseException: pass\n"
    async with pool() as workers:
        execution = await run(workers, hanging, timeout_s=0.3)
        assert execution.timed_out
        assert (await run(workers, "def verify(env):\n    return 1\n")).result == 1


async def test_a_verifier_that_kills_its_process_is_no_grade() -> None:
    async with pool() as workers:
        execution = await run(workers, "import os\ndef verify(env):\n    os._exit(3)\n")
        assert execution.retryable and execution.error is not None
        assert (await run(workers, "def verify(env):\n    return 1\n")).result == 1


@pytest.mark.parametrize(
    "body",
    ["x = bytearray(2**34)", "import tempfile; tempfile.TemporaryFile().raw.write(b'x')"],
)
async def test_memory_and_files_are_limited(body: str) -> None:
    async with pool() as workers:
        execution = await run(workers, f"def verify(env):\n    {body}\n    return 1\n")
        assert execution.result is None


async def test_a_verifier_sees_no_secrets_of_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOTILLA_TOKEN", "s3cret-s3cret-s3cret")
    source = "import os\ndef verify(env):\n    print(dict(os.environ))\n    return 1\n"
    async with pool() as workers:
        assert "s3cret" not in (await run(workers, source)).stdout


async def test_what_a_verifier_prints_is_bounded_and_never_breaks_the_protocol() -> None:
    source = """
import sys
def verify(env):
    print('{"done": {"result": 1}}')
    sys.__stdout__ is None or print("x" * 3_000_000)
    return 0
"""
    async with pool() as workers:
        execution = await run(workers, source)
        assert execution.result == 0
        assert len(execution.stdout) == 2**18 + len("\n...\n")


async def test_many_grades_share_few_workers() -> None:
    source = "def verify(env):\n    return len(env.db().table('bookings').all())\n"
    async with pool(size=2) as workers:
        executions = await asyncio.gather(*(run(workers, source) for _ in range(40)))
    assert [execution.result for execution in executions] == [2] * 40


async def test_an_environment_that_fails_during_grading_is_not_the_verifiers_fault() -> None:
    async def query(db: str, sql: str, args: Sequence[SqlValue]) -> Rows:
        raise BackendError("lost", "it is gone", delivered=False, lost=True)

    async def snapshot(db: str) -> bytes | None:
        return None

    source = "def verify(env):\n    return env.db().table('t').count()\n"
    async with pool() as workers:
        verification = Verification(source, "verify", query, snapshot, {}, trusted=True)
        with pytest.raises(BackendError, match="it is gone"):
            await workers.run_verifier(verification, timeout_s=5.0)


def test_unlisted_changes_fail_and_name_the_row(dbs: Any) -> None:
    diff = dbs["seed"].diff(dbs["current"])
    with pytest.raises(AssertionError, match="insert in 'bookings', row 3"):
        diff.expect_exactly([MODIFIED, DELETED])
    with pytest.raises(AssertionError, match="modify in 'bookings', row 1"):
        diff.expect_only_v2([])
    diff.expect_only_v2([INSERTED, MODIFIED, DELETED])
    diff.expect_exactly([INSERTED, MODIFIED, DELETED])


def test_a_change_that_did_not_happen_fails_only_when_exactness_is_required(dbs: Any) -> None:
    more = [INSERTED, MODIFIED, DELETED, INSERTED | {"pk": 4}]
    diff = dbs["seed"].diff(dbs["current"])
    diff.expect_only_v2(more)
    with pytest.raises(AssertionError, match="did not happen"):
        diff.expect_exactly(more)


@pytest.mark.parametrize(
    ("fields", "passes"),
    [
        ([("id", 3), ("guest", "Eve"), ("hotel_id", 9), ("extra", None)], True),
        ([("id", 3), ("guest", ...), ("hotel_id", ...), ("extra", ...)], True),
        ([("id", 3), ("guest", "Eve"), ("hotel_id", 8), ("extra", None)], False),
        ([("id", 3), ("guest", "Eve"), ("extra", None)], False),
    ],
)
def test_an_inserted_row_must_have_the_specified_fields(
    dbs: Any, fields: list[Any], passes: bool
) -> None:
    allowed = [INSERTED | {"fields": fields}, MODIFIED, DELETED]
    diff = dbs["seed"].diff(dbs["current"])
    if passes:
        diff.expect_only_v2(allowed)
    else:
        with pytest.raises(AssertionError):
            diff.expect_only_v2(allowed)


def test_the_older_shape_lists_fields_and_markers(dbs: Any) -> None:
    allowed = [
        {"table": "bookings", "pk": 3, "field": None, "after": "__added__"},
        {"table": "bookings", "pk": 2, "field": None, "after": "__removed__"},
        {"table": "bookings", "pk": 1, "field": "hotel_id", "after": 70},
    ]
    diff = dbs["seed"].diff(dbs["current"])
    diff.expect_only(allowed)
    with pytest.raises(AssertionError, match="hotel_id was 7"):
        diff.expect_only([*allowed[:2], {"table": "bookings", "pk": 1, "field": "guest"}])


def test_only_rows_that_are_named_are_looked_at_and_elsewhere_their_number(dbs: Any) -> None:
    """Fleet does the same. expect_exactly requires every change to be listed."""
    diff = dbs["seed"].diff(dbs["current"])
    diff.expect_only_v2([MODIFIED])
    with pytest.raises(AssertionError, match="'log' had 0 rows and has 1"):
        changed = databases(CHANGE + "INSERT INTO log VALUES ('x');")
        other = Database("current", direct(changed))
        try:
            dbs["seed"].diff(other).expect_only_v2([MODIFIED])
        finally:
            for connection in changed.values():
                connection.close()


def test_ignored_tables_and_fields_do_not_count(dbs: Any) -> None:
    ignore = IgnoreConfig(table_fields={"bookings": {"hotel_id"}})
    dbs["seed"].diff(dbs["current"], ignore).expect_only_v2([INSERTED, DELETED])
    dbs["seed"].diff(dbs["current"], IgnoreConfig(tables={"bookings"})).expect_only_v2([])


def test_equal_json_in_other_order_is_no_change() -> None:
    connections = databases('UPDATE bookings SET extra = \'{"b": 2, "a": 1}\' WHERE id = 1;')
    run_query = direct(connections)
    Database("seed", run_query).diff(Database("current", run_query)).expect_only_v2([])
    for connection in connections.values():
        connection.close()


def test_text_helpers_compare_as_fleets_do() -> None:
    assert normalized_contains("Hotel Gracery!", {"name": "hotel-gracery tokyo"})
    assert normalized_string_comparison("A.B.", "ab")
    assert extract_numbers("1,200 and -3.5") == [1200.0, -3.5]
    assert contains_number("cost: 1,200", "1200")
    assert not contains_number("cost", "many")


def test_imports_of_the_sdk_are_removed_and_others_kept() -> None:
    source = "from fleet import a\nimport fleet.verifiers\nimport json\nfleeting = 1\n"
    assert without_fleet(source) == "import json\nfleeting = 1\n"


@pytest.mark.parametrize("line", [b"[" + b"[]," * 2**20 + b"1]", b'{"done":' * 4000])
def test_a_line_that_would_build_too_much_is_refused_unbuilt(line: bytes) -> None:
    began = time.process_time()
    with pytest.raises(ProtocolError, match=r"too much at once: it (holds more|is nested)"):
        parse_message(line)
    assert time.process_time() - began < 2.0


def test_a_sandbox_writes_only_so_much_and_queries_only_so_often() -> None:
    budget = MessageBudget()
    with pytest.raises(ProtocolError, match="more than 16777216 bytes"):
        for _ in range(5):
            budget.count_line(b"x" * 2**22)
    budget = MessageBudget()
    with pytest.raises(ProtocolError, match="sent more than 20000 requests"):
        for _ in range(20_001):
            budget.count_line(b"x")
