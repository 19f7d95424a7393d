"""Recorded episodes: conversations with tool calls and a reward, as Flotilla writes them in dumps,
in exports and by `flotilla env try --out`; and the solution that a conversation holds."""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_common.text.parsing import TextLimits, make_plain, parse_json
from flotilla_reading.data.entries import DataError
from flotilla_reading.play.solutions import Solution, SolutionCall

Messages = Sequence[Mapping[str, Any]]
_KEYS = ("task_key", "task", "key")
# Which of the attempts at its task an episode is.
_WHICH = ("group_id", "attempt_index", "attempt_try", "attempt")
_DONE = "<done>"
# Of a line, and of the arguments of a call.
_LIMITS = TextLimits(bytes=2**26, values=2**22)
_ARGUMENTS = TextLimits(bytes=2**22, values=2**18)


@dataclass(frozen=True, slots=True)
class RecordedEpisode:
    """An attempt at the task `key`; `reward` is None if it has no grade. The arguments of calls are
    JSON text, and `tools` None if they were not recorded."""

    key: str
    messages: Messages
    tools: Messages | None
    reward: float | None
    no_grade: str
    digest: str


def read_episodes(path: Path) -> Iterator[RecordedEpisode]:
    """Yield the episodes of a file of JSON lines. Raises DataError."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parse_line(line, f"{path}: line {number}")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def _parse_line(line: bytes, where: str) -> RecordedEpisode:
    try:
        row = parse_json(line, _LIMITS)
        if not isinstance(row, dict):
            raise ValueError("expected an object")  # noqa: TRY004, TRY301
        return to_episode(row)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error


def to_episode(row: Mapping[str, Any]) -> RecordedEpisode:
    """Return the episode of a row. Raises ValueError, which names the field."""
    key = next((row[name] for name in _KEYS if isinstance(row.get(name), str)), None)
    if not key:
        raise ValueError(f"it names no task: expected one of {', '.join(_KEYS)}")
    reward = _read_reward(row)
    said = enumerate(_list_of(row, "messages"))
    messages = make_plain([to_message(each, number) for number, each in said])
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = parse_json(tools, _LIMITS)
    if tools is not None and not isinstance(tools, list):
        raise ValueError('"tools" must be a list, or JSON of one')
    reason = make_plain(str(row.get("no_grade") or row.get("failure") or "unknown"))
    return RecordedEpisode(
        *(key, messages, make_plain(tools), reward, "" if reward is not None else reason),
        digest_of([*map(row.get, _WHICH), messages, reward]),
    )


def to_message(message: Any, number: int) -> dict[str, Any]:
    """Return a message of a conversation with the arguments of its calls as text, and without the
    empty fields that tables have. Raises ValueError."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"messages[{number}] is no message with a role")  # noqa: TRY004
    if not isinstance(message.get("tool_call_id"), str | None):
        raise ValueError(f"messages[{number}].tool_call_id must be a text")  # noqa: TRY004
    kept = {name: value for name, value in message.items() if value is not None}
    if not kept.get("tool_calls"):
        return {name: value for name, value in kept.items() if name != "tool_calls"}
    try:
        return {**kept, "tool_calls": [_to_call(call) for call in kept["tool_calls"]]}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"messages[{number}].tool_calls: no call of a function") from error


def find_solution(key: str, messages: Messages, *, stopped: bool) -> Solution:
    """Return the calls of a conversation that were executed, and the answer of its last turn,
    unless a limit `stopped` it. Calls without a JSON object as arguments reached no tool."""
    calls: list[SolutionCall] = []
    for position, message in enumerate(messages):
        answered = _answered_after(messages, position)
        for call in message.get("tool_calls") or ():
            arguments = _read_arguments(call["function"].get("arguments"))
            if arguments is not None and call.get("id", "") in answered:
                calls.append(SolutionCall(call["function"]["name"], arguments))
    last = messages[-1] if messages else {}
    ended = last.get("role") == "assistant" and not last.get("tool_calls")
    text = _text_of(last.get("content")).replace(_DONE, "").strip()
    return Solution(key, tuple(calls), text if ended and not stopped else None)


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a JSON value, in hex."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _answered_after(messages: Messages, position: int) -> set[str]:
    """Return the ids of calls that the tools answer until the next turn of the policy."""
    found: set[str] = set()
    for message in messages[position + 1 :]:
        if message.get("role") != "tool":
            break
        found.add(message.get("tool_call_id") or "")
    return found


def _text_of(content: Any) -> str:
    """Return the text of a message, which may be in parts."""
    parts = content if isinstance(content, list) else [{"text": content}]
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))


def _read_arguments(written: Any) -> dict[str, Any] | None:
    try:
        value = parse_json(written or "{}", _ARGUMENTS) if isinstance(written, str) else written
    except ValueError:
        return None
    # Text inside of text: what cannot be written is only found here.
    return make_plain(value) if isinstance(value, dict) else {} if value is None else None


def _to_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    named = {"name": str(function["name"]), "arguments": text}
    return {"id": str(call.get("id") or ""), "type": "function", "function": named}


def _read_reward(row: Mapping[str, Any]) -> float | None:
    reward = row.get("reward", "")
    if reward is None:
        return None
    # No number is infinite: an integer could still be more than a float holds.
    if not isinstance(reward, int | float) or not abs(reward) <= sys.float_info.max:
        raise ValueError('needs "reward", a number or null')
    return float(reward)


def _list_of(row: Mapping[str, Any], name: str) -> Iterable[Any]:
    if not isinstance(row.get(name), list) or not row[name]:
        raise ValueError(f'needs "{name}", a list that is not empty')
    return row[name]
