"""Small databases and specifications to compare engines on, and the engines themselves."""

import contextlib
import sqlite3
import warnings
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from flotilla_env_gateway.verify import verifier_globals
from flotilla_env_gateway.verify.change_rules import IgnoreConfig

with warnings.catch_warnings():
    # The SDK still uses validators of pydantic's first version.
    warnings.simplefilter("ignore")
    from fleet.instance.models import Resource, ResourceMode, ResourceType
    from fleet.resources.sqlite import SQLiteResource
    from fleet.verifiers import db as local
    from fleet.verifiers import local_executor as local_executor

SCHEMA = """
CREATE TABLE numbered (id INTEGER PRIMARY KEY, name TEXT, n INT);
CREATE TABLE named (code TEXT PRIMARY KEY, data TEXT);
CREATE TABLE paired (a INT, b TEXT, v INT, PRIMARY KEY (a, b));
CREATE TABLE keyless (id INT, v TEXT);
"""
COLUMNS = {
    "numbered": ("id", "name", "n"),
    "named": ("code", "data"),
    "paired": ("a", "b", "v"),
    "keyless": ("id", "v"),
}
KEYS: dict[str, list[Any]] = {
    "numbered": [1, 2, 3],
    "named": ["x", "y", "1"],
    "paired": [(1, "x"), (1, "y"), (2, "x")],
    "keyless": [1, 2],
}
PLAIN = st.sampled_from([None, 0, 1, 2, "", "a", "Abc", "1"])
JSON = st.sampled_from(['{"a": 1, "b": [2]}', '{"b": [2], "a": 1}', "[1, 2]", "[1,2]", "{x}"])
State = dict[str, dict[Any, list[Any]]]


def states(values: st.SearchStrategy[Any]) -> st.SearchStrategy[State]:
    return st.fixed_dictionaries(
        {
            table: st.dictionaries(
                st.sampled_from(KEYS[table]),
                st.lists(values, min_size=(rest := _rest(table)), max_size=rest),
                max_size=3,
            )
            for table in COLUMNS
        }
    )


def _rest(table: str) -> int:
    return len(COLUMNS[table]) - (2 if table == "paired" else 1)


@st.composite
def pairs(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> tuple[State, State]:
    """Two states that differ in some of the tables."""
    before = draw(states(values))
    other = draw(states(values))
    changed = draw(st.sets(st.sampled_from(sorted(COLUMNS))))
    return before, {table: (other if table in changed else before)[table] for table in COLUMNS}


@st.composite
def specs(draw: st.DrawFn, values: st.SearchStrategy[Any]) -> dict[str, Any]:
    """One specification, of any shape that the rules distinguish, and of some that they refuse."""
    table = draw(st.sampled_from(sorted(COLUMNS)))
    key = draw(st.sampled_from(KEYS[table]))
    names = st.sampled_from([*COLUMNS[table], "nowhere"])
    listed = st.lists(st.tuples(names, st.just(...) | values), max_size=4)
    complete = st.just([(name, ...) for name in COLUMNS[table]])
    spec: dict[str, Any] = {"table": table, "pk": _as_written(draw, key)}
    kind = draw(st.sampled_from(["insert", "modify", "delete", "field", "marker"]))
    if kind == "field":
        return spec | {"field": draw(names), "after": draw(values)}
    if kind == "marker":
        marker = draw(st.sampled_from(["__added__", "__removed__"]))
        return spec | {"after": marker} | draw(st.sampled_from([{"fields": None}, {"field": None}]))
    spec["type"] = kind
    if kind != "modify":
        return spec | draw(
            st.sampled_from([{}, {"fields": None}, {"fields": draw(listed | complete)}])
        )
    strict = draw(st.sampled_from([{}, {"no_other_changes": True}, {"no_other_changes": False}]))
    return spec | draw(st.sampled_from([{}, {"resulting_fields": draw(listed)} | strict]))


def _as_written(draw: st.DrawFn, key: Any) -> Any:
    if isinstance(key, tuple):
        return draw(st.sampled_from([key, list(key)]))
    return draw(st.sampled_from([key, str(key)]))


def ignores() -> st.SearchStrategy[dict[str, Any]]:
    columns = sorted({name for names in COLUMNS.values() for name in names})
    return st.fixed_dictionaries(
        {},
        optional={
            "tables": st.sets(st.sampled_from(sorted(COLUMNS)), max_size=1),
            "fields": st.sets(st.sampled_from(columns), max_size=1),
            "table_fields": st.just({"numbered": {"n"}, "named": {"data"}}),
        },
    )


@contextlib.contextmanager
def opened(folder: Path, before: State, after: State) -> Generator["Engines"]:
    paths = [folder / "seed.sqlite", folder / "current.sqlite"]
    for path, state in zip(paths, (before, after), strict=True):
        path.unlink(missing_ok=True)
        _write(path, state)
    connections = [sqlite3.connect(path) for path in paths]
    try:
        yield Engines(paths, connections)
    finally:
        for connection in connections:
            connection.close()


def _write(path: Path, state: State) -> None:
    """Write row numbers that depend on the rows' keys alone."""
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.executescript(SCHEMA)
        for table, rows in state.items():
            names = ["rowid", *COLUMNS[table]]
            statement = (
                f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
            )
            for key, rest in rows.items():
                values = key if isinstance(key, tuple) else (key,)
                database.execute(statement, [KEYS[table].index(key) + 1, *values, *rest])
        database.commit()
        path.write_bytes(database.serialize())


class Engines:
    """The same two databases through ours, through Fleet's over the wire, and through its local."""

    def __init__(self, paths: list[Path], connections: list[sqlite3.Connection]) -> None:
        self.paths = [str(path) for path in paths]
        by_name: dict[str, sqlite3.Connection] = dict(
            zip(("seed", "current"), connections, strict=True)
        )

        def run(db: str, sql: str, args: Sequence[Any]) -> tuple[list[str], list[Any]]:
            cursor = by_name[db].execute(sql, tuple(args))
            return [column[0] for column in cursor.description], cursor.fetchall()

        self.run = run
        self.ours = [verifier_globals.Database(name, run) for name in by_name]
        self.remote = [
            SQLiteResource(
                Resource(name=name, type=ResourceType.db, mode=ResourceMode.ro, label=None),
                db_path=path,
            )
            for name, path in zip(by_name, self.paths, strict=True)
        ]
        self.local = [local.DatabaseSnapshot(path, name="x") for path in self.paths]

    def verdicts(self, method: str, changes: list[dict[str, Any]], ignore: dict[str, Any]) -> Any:
        """Return the verdicts of ours, of the remote engine, and of the local one."""
        ours = verdict(self.ours, method, changes, IgnoreConfig(**ignore))
        ignored = local.IgnoreConfig(**ignore)
        remote = verdict(self.remote, method, changes, ignored)
        return ours, remote, verdict(self.local, method, changes, ignored)


def verdict(pair: Sequence[Any], method: str, changes: list[dict[str, Any]], ignore: Any) -> str:
    diff = pair[0].diff(pair[1], ignore)
    return outcome(lambda: getattr(diff, method)([dict(change) for change in changes]))


def outcome(act: Callable[[], object]) -> str:
    try:
        act()
    except AssertionError:
        return "fails"
    except Exception as error:  # noqa: BLE001
        # Which error it is does not matter: any is no grade.
        return "error" if str(error) else "error without a reason"
    return "passes"
