"""What a task is: Fleet's JSON, in either of its two vocabularies.

The env_gateway reads a task here when an episode opens, and `task_files.py` reads it here when a
run starts: a file is refused at once for what would otherwise end its episodes one by one."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, cast

from flotilla_common.domain.task_fields import describe_unknown_field
from flotilla_common.text.parsing import ParseError, TextLimits, TooLargeError, parse_json

_ALIASES = {
    "key": "task_key",
    "env_id": "env_key",
    "version": "env_version",
    "data_id": "data_key",
    "verifier_func": "verifier_code",
}
# Every field that `Task` has a place for.
READ_FIELDS = frozenset(
    (
        *_ALIASES,
        *_ALIASES.values(),
        *("prompt", "env_variables", "task_modality", "offered_tools", "servers"),
    )
)
SINGLE_TURN = "single_turn"
# Of tasks that are played on a screen alone: the policy has to see.
SCREEN_MODALITIES = ("computer_use", "browser_use")
MODALITIES = ("tool_use", *SCREEN_MODALITIES, "joint", SINGLE_TURN)
# Fields for which a number is as good as its text; code that is a number is a mistake.
_NUMBERS_TOO = ("key", "env_id", "version", "data_id", "data_version")
_ENV_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_CURRENT_DATE = "CURRENT_DATE"
# Fields of a task for workers travel in one message, with the environment's tools.
_SENT_FIELDS = ("prompt", "env_variables")
_MAX_SENT_BYTES = 2**18
# Limit of a verifier's source. Detecting the function takes some hundred times as many bytes.
MAX_SOURCE_BYTES = 2**18
# A message cannot be larger anyway; this takes tens of milliseconds to parse.
TASK_LIMITS = TextLimits(bytes=2**21, values=2**16)


class TaskError(ValueError):
    """The JSON is not a task; the message names the field and the expected value."""


@dataclass(frozen=True, slots=True)
class Task:
    """One task. `verifier` is Python source. `current_date` is empty if the environment has no
    clock. A `single_turn` task has no tools: the policy's answer to the prompt is graded. Without
    `offered_tools`, all tools of the modality are offered. `servers` are the MCP servers that it
    needs, by default those of its environment. `metadata` is its author's own; only a verifier that
    asks for it reads it."""

    key: str
    prompt: str
    env_key: str
    env_version: str = ""
    data_key: str = ""
    data_version: str = ""
    verifier: str | None = None
    modality: str = "tool_use"
    current_date: str = ""
    variables: Mapping[str, str] = field(default_factory=dict[str, str])
    raw_variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    offered_tools: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()
    metadata: Any = None


def parse_task(text: str) -> Task:
    """Return the task of a JSON text. Raises TaskError."""
    return read_task(load_json_object(text, "the task"))


def read_task(fields: Mapping[str, Any]) -> Task:
    """Return the task of a JSON object that was parsed strictly. Raises TaskError."""
    if unknown := describe_unknown_field(fields):
        raise TaskError(unknown)
    if not isinstance(fields.get("passes_untouched") or False, bool):
        raise TaskError("passes_untouched must be true or false")
    raw_variables = _read_raw_variables(fields.get("env_variables"))
    variables = {name: _as_text(value) for name, value in raw_variables.items()}
    current_date = _to_iso_date(variables.pop(_CURRENT_DATE, ""))
    env_key = _read_env_key(fields)
    task = Task(
        key=_read_text(fields, "key", required=True),
        prompt=_read_text(fields, "prompt", required=True),
        env_key=env_key,
        env_version=_read_text(fields, "version"),
        data_key=_read_text(fields, "data_id"),
        data_version=_read_text(fields, "data_version"),
        verifier=_read_text(fields, "verifier_func") or None,
        modality=_read_modality(fields),
        current_date=current_date,
        variables=variables,
        raw_variables=raw_variables,
        offered_tools=_read_names(fields, "offered_tools"),
        servers=_read_names(fields, "servers"),
        metadata=fields.get("metadata"),
    )
    _check_texts(task)
    return task


def _read_env_key(fields: Mapping[str, Any]) -> str:
    env_key = _read_text(fields, "env_id", required=True)
    if not _ENV_KEY.fullmatch(env_key):
        raise TaskError(f"env_id {env_key[:100]!r} must be letters, digits, '.', '_' or '-'")
    return env_key


def load_json_object(text: str, what: str) -> dict[str, Any]:
    """Parse a JSON object strictly: no repeated keys, no NaN or Infinity. Raises TaskError."""
    try:
        value = parse_json(text, TASK_LIMITS, strict=True)
    except TooLargeError as error:
        raise TaskError(f"{what} is too large: {error}") from None
    except ParseError as error:
        raise TaskError(f"{what} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise TaskError(f"{what} is a JSON {type(value).__name__}, not an object")
    return cast("dict[str, Any]", value)


def _read_text(fields: Mapping[str, Any], name: str, *, required: bool = False) -> str:
    alias = _ALIASES.get(name)
    value = fields.get(name)
    other = fields.get(alias) if alias else None
    if value is not None and other is not None and value != other:
        raise TaskError(f"{name} and {alias} are the same field with two values")
    value = other if value is None else value
    if name in _NUMBERS_TOO and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if value is not None and not isinstance(value, str):
        raise TaskError(f"{name} must be a string, not {type(value).__name__}")
    if required and not (value or "").strip():
        names = f"{name} (or {alias})" if alias else name
        raise TaskError(f"{names} is missing or empty")
    return value or ""


def _read_modality(fields: Mapping[str, Any]) -> str:
    modality = _read_text(fields, "task_modality") or MODALITIES[0]
    if modality not in MODALITIES:
        raise TaskError(f"task_modality {modality[:100]!r} is none of {', '.join(MODALITIES)}")
    return modality


def _read_names(fields: Mapping[str, Any], field: str) -> tuple[str, ...]:
    value = fields.get(field)
    if value is None:
        return ()
    names = cast("list[Any]", value) if isinstance(value, list) else []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise TaskError(f"{field} must be a list of names, at least one")
    return tuple(names)


def _read_raw_variables(value: Any) -> dict[str, Any]:
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        return load_json_object(value, "env_variables")
    if not isinstance(value, dict):
        kind = type(value).__name__
        raise TaskError(f"env_variables must be an object or its JSON, not {kind}")
    return cast("dict[str, Any]", value)


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value)


def _to_iso_date(value: str) -> str:
    try:
        return datetime.fromisoformat(value).date().isoformat() if value else ""
    except ValueError:
        return value


def _check_texts(task: Task) -> None:
    texts = [("offered_tools", name) for name in task.offered_tools]
    texts += [("servers", name) for name in task.servers]
    names = ("key", "prompt", "env_version", "data_key", "data_version", "verifier", "current_date")
    texts += [(name, getattr(task, name) or "") for name in names]
    texts += [("env_variables", text) for pair in task.variables.items() for text in pair]
    sent_bytes = 0
    for name, text in texts:
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise TaskError(f"{name} holds a lone surrogate, which is not text") from None
        sent_bytes += size if name in _SENT_FIELDS else 0
        if name == "verifier" and size > MAX_SOURCE_BYTES:
            raise TaskError(f"verifier_func has {size} bytes, more than {MAX_SOURCE_BYTES}")
    if sent_bytes > _MAX_SENT_BYTES:
        raise TaskError(
            f"{' and '.join(_SENT_FIELDS)} take {sent_bytes} bytes, more than {_MAX_SENT_BYTES}"
        )
