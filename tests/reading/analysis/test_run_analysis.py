"""The analysis of an evaluation, from its dumps to its files."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.python_command import python_command
from flotilla_common.run_folder.metric_lines import encode_point
from flotilla_reading.analysis.analysis_files import write_analysis
from flotilla_reading.analysis.evaluation_files import NothingToAnalyzeError
from flotilla_reading.analysis.run_analysis import analyze_run
from tests.reading.analysis.episode_rows import call, row, says, write_evaluation

FOUND = call("find_issues", '[{"id": 4}]', repo="api", label="billing")
CLOSED = call("close_issue", '{"ok": true}', issue_id=4)
DENIED = call("close_issue", "permission denied", "tool_error", issue_id=4)
DONE = says("<done>")
HOSTILE = "<script>alert(1)</script>|[x](javascript:alert(1))\u202e\x1b[31m"


def attempt(task: int, index: int = 0, *turns: Any, **fields: Any) -> dict[str, Any]:
    """An attempt of the set `heldout` at a task."""
    place: dict[str, Any] = {
        "group_id": f"periodic-1-heldout-{task:05d}",
        "task_key": f"tracker-{task}",
    }
    return row(*(turns or (FOUND, CLOSED, DONE)), attempt_index=index, **place, **fields)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose first evaluation failed, and whose second failed at one task of three."""
    folder = tmp_path / "demo-1"
    write_evaluation(folder, 0, [attempt(task, n) for task in range(3) for n in range(2)])
    after = [attempt(0, n, reward=1.0) for n in range(2)]
    after += [attempt(1, 0, reward=1.0), attempt(1, 1, FOUND, DENIED, DENIED, DONE)]
    after += [attempt(2, n, FOUND, stop="max_turns") for n in range(2)]
    lost: dict[str, Any] = {
        "reward": None,
        "stop": "env_lost",
        "failure": "env_lost",
        "messages": [],
    }
    # One try was lost and repeated; one attempt was never graded.
    after += [{**attempt(0, 1, **lost), "attempt_try": 0}, attempt(3, 0, **lost)]
    after[1]["attempt_try"] = 1
    write_evaluation(folder, 8, after)
    (folder / "spec.json").write_text(json.dumps({"policy": {"max_model_len": 400}}))
    values = ({"signal_ratio": 0.0, "pass_at_1": 0.0, "variance_per_prompt": 0.0},)
    values += ({"signal_ratio": 0.4, "pass_at_1": 0.2, "variance_per_prompt": 0.1},)
    points = [
        {"step": step + 1, **{f"reward/tracker/{name}": value for name, value in each.items()}}
        for step, each in enumerate(values)
    ]
    (folder / "metrics.jsonl").write_text("".join(map(encode_point, points)))
    return folder


def test_behaviour_is_measured_and_ungraded_attempts_are_counted_next_to_it(run_dir: Path) -> None:
    measured = analyze_run(run_dir, None)["environments"]["tracker"]
    assert (measured["attempts"], measured["ungraded"], measured["tasks"]) == (7, 1, 4)
    assert measured["thinking_share"] == pytest.approx(0.4)
    assert measured["context_tokens_max"] == 100 + 3 * 20 + 10
    assert measured["context_use_max"] == pytest.approx(170 / 400)


def test_failures_are_counted_by_main_class_with_examples(run_dir: Path) -> None:
    failures = {each["name"]: each for each in analyze_run(run_dir, None)["failures"]}
    counts = {name: each["count"] for name, each in failures.items()}
    assert counts == {"never_done": 2, "authorization": 1, "no_environment_answer": 1}
    [example] = failures["authorization"]["examples"]
    assert (example["group_id"], example["attempt_index"]) == ("periodic-1-heldout-00001", 1)


def test_the_newest_evaluation_is_compared_with_the_first(run_dir: Path) -> None:
    analysis = analyze_run(run_dir, None)
    assert (analysis["first_step"], analysis["step"]) == (0, 8)
    [compared] = analysis["before_after"]
    assert (compared["set"], compared["env_key"]) == ("heldout", "tracker")
    before, after = compared["before"], compared["after"]
    low, high = after["interval"]
    assert low < after["pass_at_1"] < high
    paired = compared["difference"]
    assert (paired["tasks"], paired["won"], paired["lost"]) == (3, 2, 0)
    assert paired["difference"] == pytest.approx(0.5)
    assert paired["low"] < 0.5 < paired["high"]
    assert (before["pass_at_1"], before["tasks"], before["ungraded"]) == (0.0, 3, 0)
    assert after["pass_at_1"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert (after["tasks"], after["ungraded"]) == (3, 1)
    assert (after["k"], after["pass_at_k"]) == (2, pytest.approx(2 / 3))
    assert after["variance_per_prompt"] == pytest.approx((0 + 0.25 + 0) / 3)
    assert analysis["failures_before"] == {"false_completion": 6}


def test_little_signal_is_too_hard_where_little_passes(run_dir: Path) -> None:
    learning = analyze_run(run_dir, None)["learning"]["tracker"]
    assert (learning["steps"], learning["steps_with_signal"]) == (2, 0.5)
    assert learning["signal_ratio"] == pytest.approx(0.2)
    assert learning["verdict"] == "too hard"


def test_tasks_that_always_or_never_pass_are_named(run_dir: Path) -> None:
    tasks = analyze_run(run_dir, None)["tasks"]
    assert tasks["judged"] == 3
    assert (tasks["saturated"], tasks["impossible"]) == (["tracker-0"], ["tracker-2"])


def test_a_pass_that_made_no_call_is_the_first_suspect(tmp_path: Path) -> None:
    passes = [attempt(0, n, reward=1.0) for n in range(4)]
    passes += [attempt(0, 4, DONE, reward=1.0), attempt(1, 0, reward=1.0, checks_failed=["[X] a"])]
    write_evaluation(tmp_path / "demo-1", 0, passes)
    first, second = analyze_run(tmp_path / "demo-1", None)["suspects"]
    assert (first["attempt_index"], first["score"]) == (4, 5)
    assert "passed without calling a tool" in first["signs"]
    assert second["signs"] == ["passed although checks failed"]


def test_a_run_without_dumps_is_told_how_to_keep_them(tmp_path: Path, run_dir: Path) -> None:
    with pytest.raises(NothingToAnalyzeError, match=r"learner\.dumps\.enabled"):
        analyze_run(tmp_path, None)
    with pytest.raises(NothingToAnalyzeError, match="step 3; it has: 0, 8"):
        analyze_run(run_dir, 3)


def test_files_are_named_by_step_and_the_newest_stays_the_newest(run_dir: Path) -> None:
    for step in (8, 0):
        write_analysis(run_dir, analyze_run(run_dir, step))
    folder = run_dir / "analysis"
    names = {f"{name}.{form}" for name in ("step_0", "step_8", "newest") for form in FORMS}
    assert {path.name for path in folder.iterdir()} == names
    assert json.loads((folder / "newest.json").read_bytes())["step"] == 8


FORMS = ("json", "md", "html")


def test_no_text_of_others_becomes_markup(tmp_path: Path) -> None:
    rows = [attempt(0, n, FOUND) for n in range(2)]
    write_evaluation(tmp_path / "demo-1", 0, rows)
    hostile = [{**each, "env_key": HOSTILE, "task_key": HOSTILE} for each in rows]
    path = tmp_path / "demo-1" / "evals" / "step_0" / "tracker.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in hostile))
    write_analysis(tmp_path / "demo-1", analyze_run(tmp_path / "demo-1", None))
    page = (tmp_path / "demo-1" / "analysis" / "newest.html").read_text()
    assert "&lt;script&gt;" in page and "<script" not in page
    marked = (tmp_path / "demo-1" / "analysis" / "newest.md").read_text()
    assert r"\<script\>" in marked and r"\[x\](javascript" in marked
    for text in (page, marked):
        assert not re.search("[\x1b\u202e]", text)


def test_the_program_writes_the_files_and_says_which(run_dir: Path) -> None:
    command = python_command("-m", "flotilla_reading.analysis", str(run_dir))
    ended = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0] == str(run_dir / "analysis" / "step_8.json")
    nothing = (*command[:-1], str(run_dir.parent))
    empty = subprocess.run(nothing, env=child_environment(), capture_output=True, text=True)
    assert empty.returncode == 1
    assert empty.stderr.startswith("error: run ")
