"""Fleet's rules for matching a row's change to its specification. Pure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

Row = dict[str, Any]
Spec = Mapping[str, Any]

_MARKERS = {"insert": "__added__", "delete": "__removed__"}
_KINDS = ("insert", "modify", "delete")


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
    """One changed row. `values` are compared with specifications: all values of an inserted or
    deleted row, only the changed ones of a modified row."""

    kind: str
    table: str
    pk: Any
    values: Mapping[str, Any]
    before: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def describe(self, problem: str = "") -> str:
        shown = dict(list(self.values.items())[:10])
        description = f"{self.kind} in {self.table!r}, row {self.pk!r}: {shown}"
        return f"{description} ({problem})" if problem else description


def field_problem(change: Change, specs: Sequence[Spec], ignore: IgnoreConfig) -> str | None:
    """Check a change by the rules of `expect_only`; return None if it is allowed."""
    if change.kind == "modify":
        return _unlisted_field(change, specs)
    if any(spec.get("after") == _MARKERS[change.kind] for spec in specs):
        return None
    return change.describe()


def row_problem(change: Change, specs: Sequence[Spec], ignore: IgnoreConfig) -> str | None:
    """Check a change by the rules of `expect_only_v2`: the first specification of the same
    type counts."""
    whole = next((spec for spec in specs if spec.get("type") == change.kind), None)
    if whole is None:
        return _unspecified_problem(change, specs)
    fields = whole.get("resulting_fields" if change.kind == "modify" else "fields")
    if fields is None:
        return None
    strict = _read_strictness(whole) if change.kind == "modify" else change.kind == "insert"
    if change.kind == "delete" and (missing := _parse_fields(fields).keys() - change.values.keys()):
        return change.describe(f"it had no field {min(missing)!r}")
    # Only the specification decides which fields of a deleted row count.
    ignored = ignore if change.kind != "delete" else IgnoreConfig()
    problem = next(_find_mismatches(change, fields, ignored, strict=strict), None)
    return change.describe(problem) if problem else None


def exact_problems(
    changes: Sequence[Change], specs: Sequence[Spec], ignore: IgnoreConfig
) -> list[str]:
    """Check all changes by the rules of `expect_exactly`: the last specification of a row and
    type counts."""
    for spec in specs:
        _check_exact(spec)
    wanted = {(spec["type"], spec["table"], str(spec["pk"])): spec for spec in specs}
    problems: list[str] = []
    for change in changes:
        spec = wanted.pop((change.kind, change.table, str(change.pk)), None)
        if spec is None:
            problems.append(change.describe())
            continue
        fields = spec.get("resulting_fields" if change.kind == "modify" else "fields")
        if fields is None:
            continue
        strict = _read_strictness(spec) if change.kind == "modify" else change.kind == "insert"
        mismatches = "; ".join(_find_mismatches(change, fields, ignore, strict=strict))
        problems += [change.describe(mismatches)] if mismatches else []
    return problems + [f"expected and did not happen: {dict(spec)}" for spec in wanted.values()]


def are_equivalent(one: Any, other: Any) -> bool:
    """Return True if the values are equal, or both are JSON texts of equal values."""
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


def _unspecified_problem(change: Change, specs: Sequence[Spec]) -> str | None:
    """Check a change by the older form of specification, which `expect_only_v2` still accepts."""
    if change.kind == "modify":
        return _unlisted_field(change, specs)
    marker = _MARKERS[change.kind]
    listed = any(spec.get("fields") is None and spec.get("after") == marker for spec in specs)
    return None if listed else change.describe()


def _unlisted_field(change: Change, specs: Sequence[Spec]) -> str | None:
    for name, value in change.values.items():
        listed = [spec for spec in specs if spec.get("field") == name]
        if not any(are_equivalent(spec.get("after"), value) for spec in listed):
            return change.describe(f"{name} was {change.before.get(name)!r}")
    return None


def _find_mismatches(
    change: Change, fields: Sequence[tuple[str, Any]], ignore: IgnoreConfig, *, strict: bool
) -> Iterator[str]:
    expected = _parse_fields(fields)
    for name, value in change.values.items():
        if name == "rowid" or ignore.should_ignore_field(change.table, name):
            continue
        if name not in expected:
            if strict:
                yield f"{name} is {value!r} and not in the specification"
        elif expected[name] is not ... and not are_equivalent(expected[name], value):
            yield f"{name} is {value!r}, expected {expected[name]!r}"


def _read_strictness(spec: Spec) -> bool:
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


def _check_exact(spec: Spec) -> None:
    missing = [name for name in ("type", "table", "pk") if name not in spec]
    if missing or spec["type"] not in _KINDS:
        what = f"no {missing[0]!r}" if missing else f"the type {spec['type']!r}"
        raise ValueError(
            f"a specification for expect_exactly has a table, a pk and a type, one of {_KINDS}; "
            f"this has {what}: {dict(spec)}"
        )
