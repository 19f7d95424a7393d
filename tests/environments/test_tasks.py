import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flotilla_environments.api import ENV_KEYS
from flotilla_environments.task_generator import draw_scenario
from flotilla_environments.tasks import TaskError, load_tasks, make_task, make_tasks, normalize_task

TASK = {"key": "k", "prompt": "p", "env_id": "shop"}


def test_a_task_is_in_the_sdk_vocabulary() -> None:
    task = make_task("shop", "train", 12)
    assert list(task) == [
        "key",
        "prompt",
        "env_id",
        "version",
        "data_id",
        "data_version",
        "verifier_func",
        "task_modality",
        "env_variables",
    ]
    assert task["key"] == "shop-train-000012"
    assert "def validate_task(env, final_answer=None) -> dict:" in task["verifier_func"]
    assert set(task["env_variables"]) == {"CURRENT_DATE", "LOGGED_IN_USER", "LOGGED_IN_NAME"}
    assert normalize_task(task) == task


def test_prompts_name_every_slot() -> None:
    for task in make_tasks(ENV_KEYS, "train", 300):
        of = draw_scenario(task["env_id"], task["data_id"])
        assert all(str(value) in task["prompt"] for value in of.slots.values())
        assert "{" not in task["prompt"]


def test_both_vocabularies_are_read() -> None:
    other = {
        "task_key": "k",
        "prompt": "p",
        "env_key": "shop",
        "env_version": "v1",
        "data_key": "train-000001",
        "verifier_code": "code",
        "env_variables": '{"CURRENT_DATE": "2026-01-01"}',
        "difficulty": 2,
    }
    assert normalize_task(other) == {
        "key": "k",
        "prompt": "p",
        "env_id": "shop",
        "version": "v1",
        "data_id": "train-000001",
        "verifier_func": "code",
        "env_variables": {"CURRENT_DATE": "2026-01-01"},
        "difficulty": 2,
        "task_modality": "tool_use",
    }
    assert normalize_task(TASK | {"task_key": "other"})["key"] == "k"
    assert normalize_task(TASK)["env_variables"] == {}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": " "}, "task k: prompt must be"),
        ({"env_id": None}, r"task k: env_id \(or env_key\) must be"),
        ({"key": 3}, r"key \(or task_key\) must be"),
        ({"env_variables": "{"}, "env_variables is not JSON"),
        ({"env_variables": [1]}, "env_variables must be an object"),
    ],
)
def test_a_bad_task_is_refused_by_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        normalize_task(TASK | change)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ('{"jobs": []}', "expected"),
        ("[1]", "is not a task"),
        (json.dumps([TASK, TASK]), "occurs twice"),
    ],
)
def test_a_bad_task_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "tasks.json"
    path.write_text(content)
    with pytest.raises(TaskError, match=message):
        load_tasks(path)


def test_the_command_writes_a_file_that_loads(tmp_path: Path) -> None:
    out = tmp_path / "sub" / "train.json"
    command = [
        sys.executable,
        "-m",
        "flotilla_environments.tasks",
        "--split",
        "train",
        "--count",
        "6",
    ]
    subprocess.run([*command, "--start", "3", "--out", str(out)], check=True, timeout=30)
    tasks = load_tasks(out)
    assert [task["env_id"] for task in tasks] == list(ENV_KEYS) * 2
    assert tasks[0] == make_task("booking", "train", 1)
    shown = subprocess.run([*command[:3], "--help"], capture_output=True, text=True, timeout=30)
    assert "names that RL never trains on" in " ".join(shown.stdout.split())
