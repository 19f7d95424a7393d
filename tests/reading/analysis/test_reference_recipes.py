"""The reference system's own recipes for the analysis of a run, on our dumps: turns and calls
counted in the text, success by group, variance, and the share of steps with signal."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from flotilla_common.run_folder.metric_lines import encode_point
from flotilla_reading.analysis.attempt_measures import measure_attempt
from flotilla_reading.analysis.run_analysis import analyze_run, measure_environment
from tests.reading.analysis.episode_rows import row, says, write_evaluation
from tests.reading.analysis.scripted_play import FOLDER

Rows = Sequence[dict[str, Any]]
# Rewards of three attempts at each of four tasks.
REWARDS = ((1.0, 1.0, 1.0), (0.0, 1.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.5, 1.0))


def dumped(env: str) -> Rows:
    """Attempts of a run, as it dumped them, without their tokens."""
    rows = [json.loads(line) for line in (FOLDER / "dumped.jsonl").read_text().splitlines()]
    return [each for each in rows if each["env_key"] == env]


def measured(rows: Rows) -> dict[str, Any]:
    return measure_environment([measure_attempt(each) for each in rows], None)


def count_turns(rows: Rows) -> float:
    texts = [each["input_prompt"] + each["output_response"] for each in rows]
    return fmean(text.count("<|im_start|>assistant") for text in texts)


def count_calls(rows: Rows) -> float:
    return fmean(each["output_response"].count('"name":') for each in rows)


@pytest.mark.parametrize("env", ["tracker", "booking"])
def test_turns_are_those_of_the_text(env: str) -> None:
    assert measured(dumped(env))["avg_turns"] == count_turns(dumped(env))


def test_calls_are_those_of_the_text_but_for_calls_that_cannot_be_read() -> None:
    rows = dumped("tracker")
    unread = [each for each in rows if each["counts"]["parse_errors"]]
    read = [each for each in rows if each not in unread]
    assert measured(read)["avg_tool_calls"] == count_calls(read)
    assert measured(unread)["avg_tool_calls"] < count_calls(unread)


def test_the_recipe_also_counts_what_else_is_called_name() -> None:
    rows = dumped("booking")
    assert measured(rows)["avg_tool_calls"] < count_calls(rows)


def test_success_and_variance_are_those_of_the_groups(tmp_path: Path) -> None:
    rows = [
        row(says("<done>"), reward=reward, attempt_index=n)
        | {"group_id": f"periodic-1-heldout-{task:05d}", "task_key": f"tracker-{task}"}
        for task, rewards in enumerate(REWARDS)
        for n, reward in enumerate(rewards)
    ]
    write_evaluation(tmp_path, 0, rows)
    found = analyze_run(tmp_path, None)["before_after"][0]["after"]
    assert (found["k"], found["pass_at_k"]) == (3, fmean(max(each) >= 1 for each in REWARDS))
    assert found["variance_per_prompt"] == pytest.approx(np.mean([np.var(r) for r in REWARDS]))


def test_steps_with_signal_are_those_with_a_group_that_varies(tmp_path: Path) -> None:
    write_evaluation(tmp_path, 3, [row(says("<done>"))])
    steps = [REWARDS[:1], REWARDS, REWARDS[2:3]]
    points = [
        {
            "step": number + 1,
            "reward/tracker/signal_ratio": fmean(np.var(each) > 0 for each in groups),
            "reward/tracker/variance_per_prompt": fmean(np.var(each) for each in groups),
        }
        for number, groups in enumerate(steps)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(map(encode_point, points)))
    share = fmean(any(np.var(each) > 0 for each in groups) for groups in steps)
    assert analyze_run(tmp_path, None)["learning"]["tracker"]["steps_with_signal"] == share
