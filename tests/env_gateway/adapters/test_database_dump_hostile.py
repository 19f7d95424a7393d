"""Environments whose servers lie about their databases. The gateway copies a database only if that
runs none of their code; whatever else they send, verifiers query them for rows instead."""

import asyncio
import json
import os
import sqlite3
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_common.domain.attempts import NoGradeReason
from flotilla_common.tasks.task_format import Task
from flotilla_env_gateway.adapters import database_dump as dump
from flotilla_env_gateway.adapters.fleet.wire import (
    InitialState,
    SnapshotCache,
    parse_initial_state,
    parse_rows,
)
from flotilla_env_gateway.adapters.http_client import open_http_session
from flotilla_env_gateway.adapters.mcp.backend import McpBackend
from flotilla_env_gateway.adapters.supervised_server import FixedAddress
from flotilla_env_gateway.config.backends import McpServer
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.ports import QueryError, Rows
from tests.env_gateway.adapters.mcp.test_session import INITIALIZE_RESULT
from tests.support.examples import examples
from tests.support.fake_gateway import open_spec, opened
from tests.support.grading_gateway import grading_gateway
from tests.support.http_server import serving_app

# Barriers that stand behind each other are looked at one by one.
INSIDE: Any = dump
STATE = InitialState(("shop", "v1"), "v1", ("shop", "v1", "data"))
ITEMS = ("items", "CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT)")
FOREVER = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 20000000)"


async def copy_of(
    schema: Sequence[Sequence[Any]], rows: Sequence[Sequence[Any]] = ()
) -> bytes | None:
    """Return the gateway's copy of a server that shows this schema and these rows."""

    async def run_query(_db: str, sql: str) -> Rows:
        if sql == dump.SCHEMA_SQL:
            return Rows((), schema)
        return Rows((), [*(["", *row] for row in schema), *rows])

    return await SnapshotCache().get_snapshot("current", STATE, run_query)


def database(content: bytes) -> sqlite3.Connection:
    copy = sqlite3.connect(":memory:")
    copy.deserialize(content)
    return copy


@pytest.fixture
def grades(tmp_path: Path) -> Path:
    """Another owner's database on the gateway's machine."""
    path = tmp_path / "grades.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE grades (reward INTEGER, secret TEXT)")
        db.execute("INSERT INTO grades VALUES (0, 'canary')")
    db.close()
    return path


def reward_in(path: Path) -> Any:
    db = sqlite3.connect(path)
    try:
        return db.execute("SELECT reward FROM grades").fetchone()[0]
    finally:
        db.close()


async def test_an_honest_database_is_copied_with_its_rows() -> None:
    content = await copy_of([ITEMS], [["items", 1, "a"], ["items", 2, None]])
    assert content is not None
    assert database(content).execute("SELECT * FROM items").fetchall() == [(1, "a"), (2, None)]


async def test_checks_defaults_and_unique_columns_are_copied_but_not_run() -> None:
    """The rows come from a database that has checked them already."""
    made = "CREATE TABLE t (a UNIQUE, b CHECK (length(b) > 9), c DEFAULT (datetime('now')))"
    content = await copy_of([("t", made)], [["t", 7, 1, "short", "x"]])
    assert content is not None
    assert database(content).execute("SELECT * FROM t").fetchall() == [(1, "short", "x")]


async def test_another_file_can_be_neither_changed_nor_read(grades: Path) -> None:
    attach = ("a", f"ATTACH '{grades}' AS other")
    change = [attach, ("b", "UPDATE other.grades SET reward = 1"), ("c", "COMMIT")]
    assert await copy_of(change) is None
    assert reward_in(grades) == 0
    read = [attach, ("stolen", "CREATE TABLE stolen AS SELECT * FROM other.grades")]
    content = await copy_of(read)
    assert content is None or b"canary" not in content


async def test_a_file_is_not_written(tmp_path: Path) -> None:
    assert await copy_of([ITEMS, ("x", f"VACUUM INTO '{tmp_path}/made.sqlite'")]) is None
    assert await copy_of([("x", f"ATTACH '{tmp_path}/too.sqlite' AS x"), ITEMS]) is None
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "sql",
    [
        f"{FOREVER} SELECT max(x) FROM c",
        f"CREATE TABLE t AS {FOREVER} SELECT x FROM c",
        f"CREATE VIEW t AS {FOREVER} SELECT x FROM c",
        "CREATE TABLE t (a, b GENERATED ALWAYS AS (a LIKE '%a%a%a%a%a%a%a%b') STORED)",
        "CREATE TABLE t (a, b GENERATED ALWAYS AS (upper(a)))",
        "CREATE TABLE t (a CHECK (a LIKE '%a%a%a%a%a%a%a%b'))",
        "CREATE TABLE t (a DEFAULT (hex(zeroblob(400000000))))",
        "CREATE TABLE t (a, b GENERATED ALWAYS AS (length(hex(zeroblob(400000000)))) STORED)",
    ],
)
async def test_a_slow_expression_is_never_evaluated_and_the_loop_continues(sql: str) -> None:
    began, of_the_loop = time.process_time(), time.thread_time()
    content = await copy_of([("t", sql)], [["t", 1, "a" * 3000], ["t", 2, "a" * 3000]])
    assert time.thread_time() - of_the_loop < 0.1
    assert time.process_time() - began < 1.0
    if content is not None:
        slow = database(content).execute("SELECT 1 FROM pragma_table_xinfo('t') WHERE hidden")
        assert slow.fetchall() == []


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT load_extension('/tmp/evil.so')",
        "PRAGMA writable_schema = ON",
        "CREATE TRIGGER t AFTER INSERT ON items BEGIN DELETE FROM items; END",
        "CREATE TEMP TABLE t (a)",
        "CREATE TABLE temp.t (a)",
        "CREATE VIRTUAL TABLE t USING fts5(a)",
        "CREATE INDEX t ON items(lower(name))",
        "INSERT INTO items VALUES (9, 'b')",
        "INSERT INTO items DEFAULT VALUES",
        "DELETE FROM sqlite_master",
        "DROP TABLE items",
        "ALTER TABLE items ADD COLUMN x DEFAULT 1",
        "CREATE TABLE u (a); CREATE TABLE t (a)",
        "CREATE TABLE u (a)",
        "BEGIN",
        "",
    ],
)
async def test_only_the_tables_that_are_named_can_be_created(sql: str) -> None:
    assert await copy_of([ITEMS, ("t", sql)]) is None
    assert await copy_of([ITEMS, ("items", sql)]) is None


REFUSED = [
    "ATTACH ':memory:' AS other",
    "SELECT 1",
    "PRAGMA writable_schema = ON",
    "PRAGMA temp_store_directory = '/tmp'",
    "INSERT INTO items VALUES (1, 'a')",
    "UPDATE items SET name = 'b'",
    "CREATE TEMP TABLE t (a)",
    "CREATE VIEW t AS SELECT 1",
    "CREATE TRIGGER t AFTER INSERT ON items BEGIN DELETE FROM items; END",
    "DROP TABLE items",
]


@pytest.mark.parametrize("sql", REFUSED)
def test_the_authorizer_refuses_whatever_is_no_table_by_itself(
    sql: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dump, "_LIMITS", {})
    refused = pytest.raises(dump.DumpRefusedError, match="not authorized")
    with refused, INSIDE._open_scratch_database() as copy:
        copy.execute(ITEMS[1])
        copy.execute(sql)


def test_tables_are_declared_in_no_other_database() -> None:
    for action in (sqlite3.SQLITE_CREATE_TABLE, sqlite3.SQLITE_READ):
        assert INSIDE._may_declare(action, "t", None, "main") == sqlite3.SQLITE_OK
        assert INSIDE._may_declare(action, "t", None, "other") == sqlite3.SQLITE_DENY
    for action in (sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE):
        assert INSIDE._may_declare(action, "sqlite_master", None, "main") == sqlite3.SQLITE_OK
        assert INSIDE._may_declare(action, "t", None, "main") == sqlite3.SQLITE_DENY


@pytest.mark.parametrize("sql", [*REFUSED[:4], *REFUSED[5:], "DELETE FROM items", ITEMS[1]])
def test_while_rows_are_taken_nothing_else_is_done(
    sql: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dump, "_LIMITS", {})
    monkeypatch.setattr(dump, "_insert_rows", lambda copy, *_: copy.execute(sql))
    with pytest.raises(dump.DumpRefusedError, match="not authorized"):
        dump.rebuild_database(dump.parse_schema([ITEMS]), [["", *ITEMS]])


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("ATTACH ':memory:' AS other", "too many attached databases"),
        ("SELECT hex(zeroblob(400000000))", "too big"),
        ("SELECT 1" + "+1" * 500, "maximum depth 100"),
        (f"{FOREVER} SELECT max(x) FROM c", "interrupted"),
    ],
)
def test_sqlites_own_limits_hold_by_themselves(
    sql: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dump, "_may_declare", lambda *_: sqlite3.SQLITE_OK)
    monkeypatch.setattr(dump, "_CPU_S", 0.05)
    with pytest.raises(dump.DumpRefusedError, match=why), INSIDE._open_scratch_database() as copy:
        copy.execute(sql).fetchall()


def test_a_copy_is_in_memory_and_trusts_no_schema() -> None:
    with INSIDE._open_scratch_database() as copy:
        copy.set_authorizer(None)
        assert copy.execute("PRAGMA journal_mode").fetchone() == ("memory",)
        assert copy.execute("PRAGMA trusted_schema").fetchone() == (0,)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ([("t", "CREATE TABLE t (a, b GENERATED ALWAYS AS (upper(a)))")], "generated columns"),
        ([(f"t{n}", f"CREATE TABLE t{n} (a)") for n in range(500)], "more than 499 tables"),
        ([("sqlite_master", "INSERT INTO sqlite_master VALUES (1)")], "not|may"),
        ([ITEMS, ITEMS], "exists"),
    ],
)
def test_a_schema_is_refused_for_what_it_is(schema: list[tuple[str, str]], why: str) -> None:
    with pytest.raises(dump.DumpRefusedError, match=why):
        dump.parse_schema(schema)


def test_the_statement_that_reads_all_tables_is_bounded() -> None:
    columns = ",".join(f"c{n}" for n in range(1999))
    wide = [(f"t{n}", f"CREATE TABLE t{n} ({columns})") for n in range(70)]
    assert len(dump.build_dump_sql(dump.parse_schema(wide[:20]))) < 2**20
    with pytest.raises(dump.DumpRefusedError, match="more than 1048576 characters of SQL"):
        dump.build_dump_sql(dump.parse_schema(wide))


async def test_too_many_rows_tables_or_bytes_are_not_copied() -> None:
    many = [["items", n, ""] for n in range(dump.MAX_ROWS + 1)]
    assert await copy_of([ITEMS], many) is None
    large = [["items", n, "x" * 2**20] for n in range(20)]
    assert await copy_of([ITEMS], large) is None
    one = [["items", 1, "x" * (dump.MAX_BYTES + 1)]]
    assert await copy_of([ITEMS], one) is None
    tables = [(f"t{n}", f"CREATE TABLE t{n} (a)") for n in range(5000)]
    assert await copy_of(tables) is None
    # Known to be slow: each is compared with all before it, without interruption.
    columns = ",".join(f"c{n}" for n in range(1500))
    pairs = ",".join(f"UNIQUE(c{n % 1500},c{n // 1500})" for n in range(60_000))
    began = time.process_time()
    assert await copy_of([("t", f"CREATE TABLE t ({columns},{pairs})")]) is None
    assert time.process_time() - began < 1.0


async def test_seeds_that_are_kept_are_bounded_in_bytes_and_schemas_in_number() -> None:
    """A server that reports another version each time is queried each time."""
    snapshots = SnapshotCache()
    rows = [["items", n, "x" * 2**20] for n in range(8)]

    async def run_query(_db: str, sql: str) -> Rows:
        return Rows((), [ITEMS] if sql == dump.SCHEMA_SQL else [["", *ITEMS], *rows])

    for number in range(200):
        if number == 20:
            rows.clear()
        state = InitialState(("shop", str(number)), "", ("shop", str(number)))
        assert await snapshots.get_snapshot("seed", state, run_query) is not None
        assert snapshots.seeds.size <= 64 * 2**20
        assert len(snapshots.seeds) <= 128
    assert len(snapshots._schemas) <= 128  # pyright: ignore[reportPrivateUsage]


def test_what_a_server_calls_its_versions_is_a_text_or_nothing() -> None:
    task = Task(key="k", prompt="p", env_key="shop", env_version="v1", data_version="v2")
    for reported in ([1], {"a": 1}, 7, None, ""):
        state = parse_initial_state({"version": reported, "data_version": reported}, task)
        assert (state.env, state.data_version) == (("shop", "v1"), "v2")
        hash(state)


def test_an_answer_of_more_rows_than_a_verifier_can_want_is_refused() -> None:
    with pytest.raises(QueryError, match="more than 100000 rows: add a limit"):
        parse_rows({"success": True, "columns": ["a"], "rows": [[1]] * 100_001})


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=6,
)
_ROW = st.lists(_ANYTHING | st.sampled_from(["", *ITEMS, "items"]), max_size=4)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(_ROW | st.just(list(ITEMS)), max_size=3), st.lists(_ROW, max_size=4))
def test_whatever_else_a_server_shows_is_no_copy_and_no_fault(
    schema: list[list[Any]], rows: list[list[Any]]
) -> None:
    content = asyncio.run(copy_of(schema, rows))
    if content is not None:
        database(content).execute("SELECT * FROM sqlite_master").fetchall()


VERIFIER = """
def verify(env):
    return int(env.db("current").select("SELECT reward FROM grades")[0]["reward"])
"""
TOOL = {"name": "look", "inputSchema": {"type": "object"}}


def wire(answer: Callable[[str], Sequence[Sequence[Any]]], slow_s: float = 0.0) -> web.Application:
    """An MCP server with Fleet's instance wire, whose databases answer with rows as they like.
    Whatever reads `grades` takes `slow_s`, as a view may."""

    async def create(request: web.Request) -> web.Response:
        root = f"{request.url.origin()}/"
        return web.json_response({"instance_id": "i", "urls": {"root": root}})

    async def mcp(request: web.Request) -> web.Response:
        requests = await request.json()
        results = {"tools/list": {"tools": [TOOL]}, "initialize": INITIALIZE_RESULT}
        result: Mapping[str, Any] = results.get(requests["method"], {})
        return web.json_response({"jsonrpc": "2.0", "id": requests.get("id"), "result": result})

    async def query(request: web.Request) -> web.Response:
        sql: str = (await request.json())["query"]
        if "FROM grades" in sql:
            await asyncio.sleep(slow_s)
        rows = answer(sql)
        return web.json_response({"success": True, "columns": ["reward"], "rows": rows})

    async def instance(_: web.Request) -> web.Response:
        return web.json_response({"instance_id": "i", "status": "running"})

    app = web.Application()
    app.router.add_post("/v1/env/instances", create)
    app.router.add_get("/v1/env/instances/i", instance)
    app.router.add_delete("/v1/env/instances/i", instance)
    app.router.add_post("/mcp", mcp)
    app.router.add_post("/api/v1/env/resources/sqlite/current/query", query)
    return app


@asynccontextmanager
async def gateway_over(app: web.Application, timeout_s: float) -> AsyncGenerator[Gateway]:
    mcp = McpServer(url="http://127.0.0.1:1", instances=True)
    config = EnvGatewayConfig.model_validate(
        {
            "backend": "mcp",
            "servers": [mcp.model_dump()],
            "verifiers": {"unsafe_local_verifiers": True, "timeout_s": timeout_s, "attempts": 1},
        }
    )
    async with serving_app(app) as url:
        http = open_http_session(max_connections=4, headers={})
        backend = McpBackend(mcp, FixedAddress(url), http)
        async with grading_gateway({"mcp": backend}, config) as gateway:
            yield gateway
        await backend.close()


def task() -> str:
    reported = {"key": "t", "prompt": "p", "env_id": "shop", "verifier_func": VERIFIER}
    return json.dumps(reported)


async def test_a_hostile_server_neither_changes_a_file_nor_the_grade(grades: Path) -> None:
    schema = [
        ["a", f"ATTACH '{grades}' AS other"],
        ["b", "UPDATE other.grades SET reward = 1"],
        ["c", "COMMIT"],
        ["grades", "CREATE TABLE grades AS SELECT * FROM other.grades"],
    ]
    app = wire(lambda sql: schema if sql == dump.SCHEMA_SQL else [[0]])
    async with gateway_over(app, 20.0) as gateway:
        session = await opened(gateway, open_spec(task=task()))
        grade = await gateway.grade_episode(session, "", None, 20.0)
    assert (grade.reward, grade.reason) == (0.0, None), grade.detail
    assert reward_in(grades) == 0


async def test_a_view_that_is_slow_costs_its_verifier_time_alone() -> None:
    """Views are not copied: the server evaluates them, and a verifier waits as long as it may."""
    schema = [["grades", "CREATE VIEW grades AS SELECT 1 AS reward"]]
    app = wire(lambda sql: schema if sql == dump.SCHEMA_SQL else [[1]], slow_s=30.0)
    async with gateway_over(app, 0.5) as gateway:
        session = await opened(gateway, open_spec(task=task()))
        of_the_loop = time.thread_time()
        grade = await gateway.grade_episode(session, "", None, 20.0)
        assert time.thread_time() - of_the_loop < 0.3
    assert (grade.reward, grade.reason) == (None, NoGradeReason.TIMEOUT), grade.detail
