"""The quarantine: a file of rules for tasks that must not be used, each with its reason.

JSON lines of {"key" or "pattern", "reason", "date", "evidence"}. A pattern is matched with whole
keys as a shell does (`*`, `?`, `[ab]`)."""

from dataclasses import asdict, dataclass
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from flotilla_common.spec.config import did_you_mean
from flotilla_common.text.parsing import ParseError, TextLimits, parse_json
from flotilla_reading.data.entries import DataError

_NAMES = ("key", "pattern", "reason", "date", "evidence")
_LIMITS = TextLimits(bytes=2**16, values=2**8)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: the key of a task, or a pattern of keys, and why, since when and from what is known
    that they must not be used."""

    key: str
    pattern: str
    reason: str
    date: str
    evidence: str

    def matches(self, key: str) -> bool:
        return key == self.key if self.key else fnmatchcase(key, self.pattern)

    def __str__(self) -> str:
        return f"key {self.key!r}" if self.key else f"pattern {self.pattern!r}"

    def to_dict(self) -> dict[str, str]:
        return {name: value for name, value in asdict(self).items() if value}


def parse_rules(data: bytes, path: Path) -> list[Rule]:
    """Return the rules of a file's content. Raises DataError, which names the line."""
    return [
        _parse_rule(line, f"{path}: line {number}")
        for number, line in enumerate(data.split(b"\n"), 1)
        if line.strip()
    ]


def _parse_rule(line: bytes, where: str) -> Rule:
    try:
        fields = parse_json(line, _LIMITS, strict=True)
    except ParseError as error:
        raise DataError(f"{where}: not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise DataError(f"{where}: expected an object, got {type(fields).__name__}")
    for name in fields:
        if name not in _NAMES:
            raise DataError(f"{where}: unknown key {name[:100]!r}{did_you_mean(name, _NAMES)}")
    if ("key" in fields) == ("pattern" in fields):
        raise DataError(f"{where}: a rule has either key or pattern")
    given = {name: _read_text(fields, name, where) for name in _NAMES if name in fields}
    for name in _NAMES[2:]:
        if name not in given:
            raise DataError(f"{where}: {name} is missing")
    try:
        date.fromisoformat(given["date"])
    except ValueError:
        raise DataError(f"{where}: date {given['date']!r} is none, such as 2026-11-28") from None
    return Rule(**{name: given.get(name, "") for name in _NAMES})


def _read_text(fields: dict[str, Any], name: str, where: str) -> str:
    value = fields[name]
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: {name} must be a non-empty string")
    return value
