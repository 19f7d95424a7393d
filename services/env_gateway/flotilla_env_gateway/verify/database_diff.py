"""Difference of two databases, checked against the allowed changes by Fleet's rules.

These are the rules of Fleet's SDK over the wire (`fleet.resources.sqlite`), which are used
for grading there. They examine only what a specification points at: the rows that it names,
and elsewhere the number of rows. `expect_exactly` requires every change to be listed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from flotilla_env_gateway.verify.change_rules import (
    Change,
    IgnoreConfig,
    Row,
    Spec,
    are_equivalent,
    exact_problems,
    field_problem,
    row_problem,
)
from flotilla_env_gateway.verify.table_query import exactly

_SHOWN = 5

Check = Callable[[Change, Sequence[Spec], IgnoreConfig], str | None]


class Source(Protocol):
    def tables(self) -> list[str]: ...

    def select(self, sql: str, args: Sequence[Any] = ()) -> list[Row]: ...


class SnapshotDiff:
    """The changes from `before` to `after`, computed on demand."""

    def __init__(
        self, before: Source, after: Source, ignore_config: IgnoreConfig | None = None
    ) -> None:
        self.before = before
        self.after = after
        self.ignore_config = ignore_config or IgnoreConfig()
        self._tables = (frozenset(before.tables()), frozenset(after.tables()))
        self._changes: list[Change] | None = None

    @property
    def changes(self) -> list[Change]:
        """All changed rows, ignored tables and fields aside."""
        if self._changes is None:
            self._changes = list(self._collect_changes())
        return self._changes

    def expect_only(self, allowed_changes: Sequence[dict[str, Any]]) -> "SnapshotDiff":
        """Require that the changed fields of each named row, or its insertion or deletion, are
        listed as {table, pk, field, after}; rows after "__added__" or "__removed__". Raises
        AssertionError otherwise."""
        return self._expect_listed(allowed_changes, field_problem)

    def expect_only_v2(self, allowed_changes: Sequence[dict[str, Any]]) -> "SnapshotDiff":
        """Require the same as `expect_only`, except that a row may be listed as a whole:
        {table, pk, type} with `fields` (insert, delete) or `resulting_fields` and
        `no_other_changes` (modify), lists of (field, value) where the value `...` matches
        any."""
        return self._expect_listed(allowed_changes, row_problem)

    def expect_exactly(self, expected_changes: Sequence[dict[str, Any]]) -> "SnapshotDiff":
        """Require that all changes are listed and all listed changes happened. Raises
        AssertionError otherwise."""
        problems = exact_problems(self.changes, expected_changes, self.ignore_config)
        return self._raise_if_any(problems, expected_changes)

    def expect(
        self,
        *,
        allow: Sequence[Mapping[str, Any]] | None = None,
        forbid: Sequence[Mapping[str, Any]] | None = None,
    ) -> "SnapshotDiff":
        """Allow or forbid changes of fields, as {table, field}, and of rows, without a field."""
        allowed = {(spec["table"], spec.get("field")) for spec in allow or ()}
        forbidden = {(spec["table"], spec.get("field")) for spec in forbid or ()}
        problems: list[str] = []
        for change in self.changes:
            if change.kind != "modify":
                problems += [change.describe()] if (change.table, None) in forbidden else []
                continue
            for name in change.values:
                key = (change.table, name)
                if key in forbidden or (allowed and key not in allowed):
                    problems.append(change.describe(f"{name} may not change"))
        return self._raise_if_any(problems, [])

    def _expect_listed(self, allowed: Sequence[dict[str, Any]], check: Check) -> "SnapshotDiff":
        for spec in allowed:
            if isinstance(spec.get("pk"), list):
                spec["pk"] = tuple(spec["pk"])
        if not allowed:
            problems = [*self._table_problems(), *(change.describe() for change in self.changes)]
            return self._raise_if_any(problems, allowed)
        named = all("table" in spec and "pk" in spec for spec in allowed)
        problems = [
            problem
            for change in (self._named_changes(allowed) if named else self.changes)
            if (problem := check(change, _specs_of_row(change, allowed), self.ignore_config))
        ]
        if named and not problems:
            problems = list(self._count_problems({spec["table"] for spec in allowed}))
        return self._raise_if_any(problems, allowed)

    def _raise_if_any(self, problems: Sequence[str], allowed: Sequence[Spec]) -> "SnapshotDiff":
        if not problems:
            return self
        shown = [f"{i}. {problem}" for i, problem in enumerate(problems[:_SHOWN], 1)]
        more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        lines_shown = [f"Allowed were {len(allowed)}: {[dict(s) for s in allowed[:3]]}"]
        raise AssertionError(
            "\n".join(["Unexpected database changes detected:", *shown, *more, *lines_shown])
        )

    def _table_problems(self) -> Iterator[str]:
        for table in sorted(self._tables[0] ^ self._tables[1]):
            if not self.ignore_config.should_ignore_table(table):
                yield f"table {table!r} came or went"

    def _count_problems(self, named: set[str]) -> Iterator[str]:
        for table in sorted((self._tables[0] | self._tables[1]) - named):
            if self.ignore_config.should_ignore_table(table):
                continue
            before, after = (self._count_rows(i, table) for i in range(2))
            if before != after:
                yield f"{table!r} had {before} rows and has {after}"

    def _count_rows(self, which: int, table: str) -> int:
        if table not in self._tables[which]:
            return 0
        return self._source_of(which).select(f"SELECT COUNT(*) AS n FROM {exactly(table)}")[0]["n"]

    def _named_changes(self, specs: Sequence[Spec]) -> Iterator[Change]:
        """Yield changes of the rows that specifications name, each row once for each way to
        write it."""
        for table, pk in {(spec["table"], spec["pk"]): None for spec in specs}:
            if self.ignore_config.should_ignore_table(table):
                continue
            keys = self._primary_key(table)
            values = pk if isinstance(pk, tuple) and len(keys) > 1 else (pk,)
            where = " AND ".join(
                f"{exactly(key)} = ?" for key, _ in zip(keys, values, strict=False)
            )
            args = values[: len(keys)]
            rows = [self._fetch_row(i, table, where, args) for i in range(2)]
            if change := self._compare_rows(table, pk, *rows):
                yield change

    def _fetch_row(self, which: int, table: str, where: str, args: Sequence[Any]) -> Row | None:
        if table not in self._tables[which]:
            return None
        sql = f"SELECT * FROM {exactly(table)} WHERE {where} LIMIT 1"
        rows = self._source_of(which).select(sql, args)
        return next(iter(rows), None)

    def _collect_changes(self) -> Iterator[Change]:
        for table in sorted(self._tables[0] | self._tables[1]):
            if self.ignore_config.should_ignore_table(table):
                continue
            keys = self._primary_key(table)
            old, new = (self._by_key(i, table, keys) for i in range(2))
            for pk in [*old, *(pk for pk in new if pk not in old)]:
                if change := self._compare_rows(table, pk, old.get(pk), new.get(pk)):
                    yield change

    def _by_key(self, which: int, table: str, keys: Sequence[str]) -> dict[Any, Row]:
        if table not in self._tables[which]:
            return {}
        columns = "rowid, *" if keys == ["rowid"] else "*"
        rows = self._source_of(which).select(f"SELECT {columns} FROM {exactly(table)}")
        if len(keys) == 1:
            return {row[keys[0]]: row for row in rows}
        return {tuple(row[key] for key in keys): row for row in rows}

    def _compare_rows(self, table: str, pk: Any, old: Row | None, new: Row | None) -> Change | None:
        if old is None or new is None:
            kind, values = ("insert", new) if old is None else ("delete", old)
            return Change(kind, table, pk, values) if values is not None else None
        after = {
            name: new.get(name)
            for name in {**old, **new}
            if not self.ignore_config.should_ignore_field(table, name)
            and not are_equivalent(old.get(name), new.get(name))
        }
        return Change("modify", table, pk, after, before=old) if after else None

    def _primary_key(self, table: str) -> list[str]:
        source = self.after if table in self._tables[1] else self.before
        columns = source.select(f"PRAGMA table_info({exactly(table)})")
        keys = sorted((column["pk"], column["name"]) for column in columns if column["pk"])
        if keys:
            return [name for _, name in keys]
        return ["id"] if any(column["name"] == "id" for column in columns) else ["rowid"]

    def _source_of(self, which: int) -> Source:
        return (self.before, self.after)[which]


def _specs_of_row(change: Change, specs: Sequence[Spec]) -> list[Spec]:
    """Return the specifications of a changed row. Keys are compared as text, as Fleet does."""
    return [
        spec
        for spec in specs
        if spec["table"] == change.table and "pk" in spec and str(spec["pk"]) == str(change.pk)
    ]
