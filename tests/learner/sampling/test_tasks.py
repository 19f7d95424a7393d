"""Errors for task files that cannot be used."""

import json
from pathlib import Path

import pytest

from flotilla_common.tasks.task_files import TaskFileError
from flotilla_learner.sampling.tasks import IMAGES, Task, load_tasks

GOOD = {"key": "a", "prompt": "do it", "env_id": "shop"}


def refusal(tmp_path: Path, content: object) -> str:
    path = tmp_path / "tasks.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(TaskFileError) as caught:
        load_tasks(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ({"task": [GOOD]}, 'the key "tasks"'),
        ([], "at least one task"),
        ("7", "expected a JSON array"),
        ([GOOD, 7], "task 1: expected an object, got int"),
        ([{**GOOD, "key": ""}], "task 0: needs a non-empty string 'key' or 'task_key'"),
        ([{**GOOD, "prompt": None}], "task 0 (a): needs a non-empty string 'prompt'"),
        ([{"key": "a", "prompt": "x"}], "needs a non-empty string 'env_key' or 'env_id'"),
        ([{**GOOD, "verifer_func": "x"}], "task 0 (a): unknown field 'verifer_func'; did you mean"),
        ([GOOD, GOOD], "two tasks have the key 'a'"),
    ],
)
def test_a_task_file_that_cannot_be_used_is_refused_by_place_and_fix(
    tmp_path: Path, content: object, message: str
) -> None:
    assert message in refusal(tmp_path, content)


def test_a_missing_file_and_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(TaskFileError, match="there is no such task file"):
        load_tasks(tmp_path / "nowhere.json")
    (tmp_path / "bytes.json").write_bytes(b'["\xff"]')
    with pytest.raises(TaskFileError, match="not UTF-8 at byte 2"):
        load_tasks(tmp_path / "bytes.json")


def test_both_vocabularies_are_read(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([GOOD, {"task_key": "b", "prompt": "x", "env_key": "desk"}]))
    assert [(task.key, task.env_key) for task in load_tasks(path)] == [("a", "shop"), ("b", "desk")]


@pytest.mark.parametrize("modality", ["computer_use", "browser_use"])
def test_tasks_on_screens_need_images(modality: str) -> None:
    assert Task("a", "shop", json.dumps({"task_modality": modality})).needs == {IMAGES}
    assert Task("a", "shop", json.dumps({"task_modality": "tool_use"})).needs == frozenset()
    assert Task("a", "shop", "{}").needs == frozenset()
