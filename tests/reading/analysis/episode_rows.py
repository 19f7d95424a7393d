"""Rows of attempts as in a run's dumps, built from short texts."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]
NO_ERRORS: Mapping[str, int] = {}


def call(name: str, answer: str | None = None, outcome: str = "ok", **arguments: Any) -> list[Message]:
    """A turn with one call, and its answer unless that is None."""
    function = {"name": name, "arguments": arguments}
    made = {"id": "call-0", "type": "function", "function": function}
    turn: Message = {"role": "assistant", "content": "", "tool_calls": [made]}
    if answer is None:
        return [turn]
    text = answer if outcome == "ok" else json.dumps({"error": answer})
    told = {"role": "tool", "content": text, "tool_call_id": "call-0", "name": name}
    return [turn, told if outcome == "ok" else {**told, "outcome": outcome}]


def says(text: str, thinking: str = "") -> list[Message]:
    """A turn without a call."""
    thought = {"reasoning_content": thinking} if thinking else {}
    return [{"role": "assistant", "content": text, **thought}]


def row(
    *turns: Sequence[Message],
    reward: float | None = 0.0,
    stop: str = "done",
    counts: Mapping[str, Any] = NO_ERRORS,
    **fields: Any,
) -> dict[str, Any]:
    """The row of an attempt at a task of the app `tracker`."""
    messages = [{"role": "user", "content": "Close the billing issue in api."}]
    messages += [message for turn in turns for message in turn]
    return {
        **{"env_key": "tracker", "task_key": "tracker-1", "group_id": "g0", "attempt_index": 0},
        **{"attempt_try": 0, "step": 1, "purpose": "eval", "eval_id": "periodic-1"},
        **{"reward": reward, "stop_reason": stop, "failure": None, "no_grade": "", "detail": ""},
        **{"checks_passed": [], "checks_failed": [], "suspicion": "", "dropped": ""},
        "counts": {"turns": len(turns), "tools": 3, "unknown_tools": {}, "tool_errors": {}, **counts},
        "turns": [],
        "sequences": [],
        "messages": messages,
        **fields,
    }
