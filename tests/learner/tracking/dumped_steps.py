"""Dumps of steps, as the process that writes them leaves them."""

import json
from pathlib import Path
from typing import Any


def episode_row(step: int, number: int, **changes: Any) -> dict[str, Any]:
    """Return the fields of a dump that a table of episodes shows."""
    return {
        "step": step,
        "group_id": f"g{number}",
        "attempt_index": number,
        "attempt_try": 0,
        "input_prompt": f"prompt {number}",
        "output_response": f"answer {number}",
        "reward": 0.5,
        "stop_reason": "answered",
        "sequences": [{"advantages": [0.0, 0.5]}, {"advantages": None}],
        **changes,
    }


def dump_steps(run_dir: Path, *steps: int, rows: int = 20) -> None:
    (run_dir / "rollouts").mkdir(exist_ok=True)
    for step in steps:
        lines = [json.dumps(episode_row(step, number)) + "\n" for number in range(rows)]
        (run_dir / "rollouts" / f"step_{step}.jsonl").write_text("".join(lines))
