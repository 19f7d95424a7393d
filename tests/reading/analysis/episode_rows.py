"""Rows of attempts as in a run's dumps, built from short texts."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Message = dict[str, Any]
NOTHING: Mapping[str, Any] = {}


def call(
    name: str, answer: str | None = None, outcome: str = "ok", **arguments: Any
) -> list[Message]:
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
    counts: Mapping[str, Any] = NOTHING,
    **fields: Any,
) -> dict[str, Any]:
    """The row of an attempt at a task of the app `tracker`."""
    messages = [{"role": "user", "content": "Close the billing issue in api."}]
    messages += [message for turn in turns for message in turn]
    calls = [message for message in messages if message.get("tool_calls")]
    return {
        **{"env_key": "tracker", "task_key": "tracker-1", "group_id": "g0", "attempt_index": 0},
        **{"attempt_try": 0, "step": 1, "purpose": "eval", "eval_id": "periodic-1"},
        **{"reward": reward, "stop_reason": stop, "failure": None, "no_grade": "", "detail": ""},
        **{"checks_passed": [], "checks_failed": [], "suspicion": "", "dropped": ""},
        "counts": {
            **{"turns": len(turns), "tools": 3, "tool_calls": len(calls), "repeats": 0},
            **{"unknown_tools": {}, "tool_errors": {}},
            **counts,
        },
        "turns": [
            {"prompt_tokens": 100 + 20 * place, "generated_tokens": 10, "thinking_tokens": 4}
            for place in range(len(turns))
        ],
        "sequences": [],
        "messages": messages,
        **fields,
    }


def write_evaluation(run_dir: Path, step: int, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as the dumps of an evaluation, one file for each environment."""
    folder = run_dir / "evals" / f"step_{step}"
    folder.mkdir(parents=True)
    for env in {row["env_key"] for row in rows}:
        lines = [json.dumps(row) for row in rows if row["env_key"] == env]
        (folder / f"{env}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "aggregated_results.jsonl").write_text("{}\n")
