"""What changed between two databases, and whether only that changed which may: Fleet's rules."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

Row = dict[str, Any]
_SHOWN = 5


class Source(Protocol):
    def tables(self) -> list[str]: ...

    def select(self, sql: str, args: Sequence[Any] = ()) -> list[Row]: ...


@dataclass(frozen=True)
class IgnoreConfig:
    """Tables, fields, and fields of tables that do not count as changed."""

    tables: set[str] | None = None
    fields: set[str] | None = None
    table_fields: dict[str, set[str]] | None = None

    def should_ignore_table(self, table: str) -> bool:
        return table in (self.tables or ())

    def should_ignore_field(self, table: str, name: str) -> bool:
        return name in (self.fields or ()) or name in (self.table_fields or {}).get(table, ())


@dataclass(frozen=True)
class Change:
    """One row that is not as it was. `values` are those that a specification is checked against:
    all of an inserted or deleted row, only the changed ones of a modified row."""

    kind: str
    table: str
    pk: Any
    values: Mapping[str, Any]
    before: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def matches(self, spec: Mapping[str, Any]) -> bool:
        """Whether `spec` speaks of this row; keys are compared as text, as Fleet does."""
        pk = spec.get("pk")
        return spec.get("table") == self.table and pk is not None and str(pk) == str(self.pk)

    def describe(self, problem: str = "") -> str:
        shown = dict(list(self.values.items())[:10])
        return f"{self.kind} in {self.table!r}, row {self.pk!r}: {shown}" + (
            f" ({problem})" if problem else ""
        )


_MARKERS = {"insert": "__added__", "delete": "__removed__"}


class SnapshotDiff:
    """The changes from `before` to `after`."""

    def __init__(
        self, before: Source, after: Source, ignore_config: IgnoreConfig | None = None
    ) -> None:
        self.ignore_config = ignore_config or IgnoreConfig()
        self.changes = list(self._collect(before, after))

    def expect_only(self, allowed_changes: Sequence[Mapping[str, Any]]) -> "SnapshotDiff":
        """Raises AssertionError unless each changed field, and each row that came or went, is
        listed as {table, pk, field, after}; rows with field None, after "__added__" or
        "__removed__"."""
        problems: list[str] = []
        for change in self.changes:
            specs = [spec for spec in allowed_changes if change.matches(spec)]
            if change.kind == "modify":
                problems += _unlisted_fields(change, specs)
            elif not any(_is_row_spec(spec, change.kind) for spec in specs):
                problems.append(change.describe())
        return self._verdict(problems, allowed_changes)

    def expect_only_v2(self, allowed_changes: Sequence[Mapping[str, Any]]) -> "SnapshotDiff":
        """Like `expect_only`, and a row may be listed as a whole: {table, pk, type} with `fields`
        (insert, delete) or `resulting_fields` and `no_other_changes` (modify), lists of
        (field, value) where the value `...` stands for any."""
        problems: list[str] = []
        for change in self.changes:
            problem = self._check_v2(change, [s for s in allowed_changes if change.matches(s)])
            problems += [problem] if problem else []
        return self._verdict(problems, allowed_changes)

    def expect_exactly(self, expected_changes: Sequence[Mapping[str, Any]]) -> "SnapshotDiff":
        """Like `expect_only_v2`, and each listed change must have happened."""
        self.expect_only_v2(expected_changes)
        happened = {(c.kind, c.table, str(c.pk)) for c in self.changes}
        missing = [
            str(dict(spec))
            for spec in expected_changes
            if (spec.get("type"), spec.get("table"), str(spec.get("pk"))) not in happened
        ]
        if missing:
            raise AssertionError("Expected changes did not happen:\n" + "\n".join(missing[:_SHOWN]))
        return self

    def _check_v2(self, change: Change, specs: Sequence[Mapping[str, Any]]) -> str | None:
        whole = [spec for spec in specs if spec.get("type") == change.kind]
        if change.kind == "modify":
            if not whole:
                unlisted = _unlisted_fields(change, specs)
                return "; ".join(unlisted) or None
            fields = whole[0].get("resulting_fields")
            strict = _strictness(whole[0]) if fields is not None else False
        else:
            bulk = next((spec for spec in whole if "fields" in spec), None)
            if bulk is None:
                listed = any(_is_row_spec(s, change.kind) and "fields" in s for s in specs)
                return None if whole or listed else change.describe()
            fields, strict = bulk["fields"], True
        if fields is None:
            return None
        problem = self._mismatch(change, fields, strict=strict)
        return change.describe(problem) if problem else None

    def _mismatch(
        self, change: Change, fields: Sequence[tuple[str, Any]], *, strict: bool
    ) -> str | None:
        expected = _parse_fields(fields)
        for name, value in change.values.items():
            if name == "rowid" or self.ignore_config.should_ignore_field(change.table, name):
                continue
            if name not in expected:
                if strict:
                    return f"{name} is {value!r} and not in the specification"
            elif expected[name] is not ... and not equivalent(expected[name], value):
                return f"{name} is {value!r}, expected {expected[name]!r}"
        return None

    def _verdict(self, problems: list[str], allowed: Sequence[Mapping[str, Any]]) -> "SnapshotDiff":
        if problems:
            shown = [f"{i}. {problem}" for i, problem in enumerate(problems[:_SHOWN], 1)]
            more = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
            told = [f"Allowed were {len(allowed)}: {[dict(s) for s in allowed[:3]]}"]
            raise AssertionError(
                "\n".join(["Unexpected database changes detected:", *shown, *more, *told])
            )
        return self

    def _collect(self, before: Source, after: Source) -> Iterator[Change]:
        tables = [set(before.tables()), set(after.tables())]
        for table in sorted(tables[0] | tables[1]):
            if self.ignore_config.should_ignore_table(table):
                continue
            keys = _primary_key(before if table in tables[0] else after, table)
            old = _by_key(before, table, keys) if table in tables[0] else {}
            new = _by_key(after, table, keys) if table in tables[1] else {}
            for pk in old.keys() | new.keys():
                if change := self._compare(table, pk, old.get(pk), new.get(pk)):
                    yield change

    def _compare(self, table: str, pk: Any, old: Row | None, new: Row | None) -> Change | None:
        if old is None or new is None:
            kind, values = ("insert", new) if old is None else ("delete", old)
            return Change(kind, table, pk, values or {})
        if old == new:
            return None
        changed = [
            name
            for name in {**old, **new}
            if not self.ignore_config.should_ignore_field(table, name)
            and not equivalent(old.get(name), new.get(name))
        ]
        after = {name: new.get(name) for name in changed}
        return Change("modify", table, pk, after, before=old) if changed else None


def equivalent(one: Any, other: Any) -> bool:
    """Equal, or both JSON texts of equal values."""
    if one == other:
        return True
    if not (_looks_like_json(one) and _looks_like_json(other)):
        return False
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False


def _looks_like_json(value: Any) -> bool:
    text = value.strip() if isinstance(value, str) else ""
    return (text[:1], text[-1:]) in (("{", "}"), ("[", "]"))


def _unlisted_fields(change: Change, specs: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        change.describe(f"{name} was {change.before.get(name)!r}")
        for name, value in change.values.items()
        if not any(
            spec.get("field") == name and equivalent(spec.get("after"), value) for spec in specs
        )
    ]


def _is_row_spec(spec: Mapping[str, Any], kind: str) -> bool:
    return spec.get("field") is None and spec.get("after") == _MARKERS[kind]


def _strictness(spec: Mapping[str, Any]) -> bool:
    value = spec.get("no_other_changes")
    if value is True or value is False:
        return value
    raise ValueError(
        f"the specification for {spec.get('table')!r}, row {spec.get('pk')!r} has "
        f"resulting_fields and needs no_other_changes, True or False; it is {value!r}"
    )


def _parse_fields(fields: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    for item in fields:
        if not isinstance(cast("object", item), tuple | list) or len(item) != 2:
            raise ValueError(f"a field is specified as (name, value) or (name, ...), not {item!r}")
    return dict(fields)


def _primary_key(database: Source, table: str) -> list[str]:
    columns = database.select(f"PRAGMA table_info([{table}])")
    keys = sorted((c["pk"], c["name"]) for c in columns if c["pk"])
    if keys:
        return [name for _, name in keys]
    return ["id"] if any(c["name"] == "id" for c in columns) else ["rowid"]


def _by_key(database: Source, table: str, keys: Sequence[str]) -> dict[Any, Row]:
    columns = "rowid, *" if keys == ["rowid"] else "*"
    rows = database.select(f"SELECT {columns} FROM [{table}]")
    if len(keys) == 1:
        return {row[keys[0]]: row for row in rows}
    return {tuple(row[key] for key in keys): row for row in rows}
