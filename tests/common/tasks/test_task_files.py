"""Task files in each of their forms, and what is wrong with a task, by file, place, key and
reason: the reasons are those of the env_gateway."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_common.tasks.task_files import (
    TaskFileError,
    parse_rows,
    read_objects,
    read_tasks,
)
from flotilla_common.tasks.task_format import TaskError, parse_task
from tests.support.examples import examples

GOOD = {"key": "a", "prompt": "do it", "env_id": "shop"}
OTHER = {"task_key": "b", "prompt": "x\u2028y", "env_key": "desk", "env_version": 2}
FORMS = {
    "array.json": json.dumps([GOOD, OTHER]),
    "object.json": json.dumps({"tasks": [GOOD, OTHER], "made": "by hand"}, indent=1),
    "lines.jsonl": f"{json.dumps(GOOD)}\n{json.dumps(OTHER, ensure_ascii=False)}\n",
    "windows.jsonl": f"{json.dumps(GOOD)}\r\n\r\n{json.dumps(OTHER)}\r\n",
    "detected.json": f"{json.dumps(GOOD)}\n{json.dumps(OTHER)}",
    "marked.json": "\ufeff" + json.dumps([GOOD, OTHER]),
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
FIELDS = st.sampled_from(
    ["key", "task_key", "prompt", "env_id", "env_key", "version", "data_id", "env_variables"]
)


def written(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_text(content, encoding="utf-8", newline="")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(TaskFileError) as caught:
        list(read_tasks(path))
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_file_holds_the_same_tasks(tmp_path: Path, name: str) -> None:
    read = list(read_tasks(written(tmp_path, name, FORMS[name])))
    assert [each.task for each in read] == [parse_task(json.dumps(row)) for row in (GOOD, OTHER)]
    assert [json.loads(each.text) for each in read] == [GOOD, OTHER]
    assert all("\n" not in each.text for each in read)
    assert read_objects(tmp_path / name) == [GOOD, OTHER]


def test_one_line_that_is_a_task_is_json_lines_by_any_name(tmp_path: Path) -> None:
    (only,) = read_tasks(written(tmp_path, "one.json", json.dumps(GOOD)))
    assert only.task.key == "a"


def test_an_empty_file_of_lines_has_no_tasks(tmp_path: Path) -> None:
    path = written(tmp_path, "none.jsonl", "\n")
    assert "at least one task" in refusal(path)
    assert list(read_tasks(path, may_be_empty=True)) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"env_key": "other"}, "env_id and env_key are the same field with two values"),
        ({"env_id": "../../etc"}, "env_id '../../etc' must be letters"),
        ({"env_variables": "{"}, "env_variables is not JSON"),
        ({"task_modality": "smell"}, "task_modality 'smell' is none of tool_use"),
        ({"offered_tools": []}, "offered_tools must be a list of names"),
        ({"verifier_func": 5}, "verifier_func must be a string, not int"),
        ({"prompt": 5.5}, "prompt must be a string, not float"),
        ({"prompt": "\ud800"}, "prompt holds a lone surrogate"),
        ({"metadata": {"note": "\ud800"}}, "a field holds a lone surrogate"),
        ({"metadata": {"score": float("nan")}}, "NaN is not a JSON number"),
        ({"metadata": [[0] * 70_000]}, "it holds more than 65536 values"),
        ({"metadata": json.loads("[" * 600 + "]" * 600)}, "it is nested more than 100 deep"),
        ({"prompt": "x" * 300_000}, "prompt and env_variables take 300000 bytes"),
    ],
)
def test_what_an_episode_would_be_refused_for_is_refused_with_the_file(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    rows = [json.dumps(row) for row in ({**GOOD, "key": "fine"}, {**GOOD, **changes})]
    in_array = refusal(written(tmp_path, "tasks.json", f"[{', '.join(rows)}]"))
    assert in_array.startswith(f"task 1 (a): {reason}")
    in_lines = refusal(written(tmp_path, "tasks.jsonl", "\n".join(rows)))
    assert in_lines.startswith(f"line 2 (a): {reason}")


def test_a_repeated_field_and_a_repeated_key_are_named_by_their_places(tmp_path: Path) -> None:
    twice = '{"key": "a", "prompt": "x", "prompt": "y", "env_id": "shop"}'
    message = refusal(written(tmp_path, "field.json", f"[{twice}]"))
    assert message == "task 0: the key 'prompt' is repeated"
    # A number and its text are one key: the env_gateway takes both.
    rows = [{**GOOD, "key": 0}, {**GOOD, "key": "0"}]
    message = refusal(written(tmp_path, "key.json", json.dumps(rows)))
    assert message == "two tasks have the key '0'; make keys unique (task 0 and task 1)"


def test_a_key_that_is_no_name_is_not_quoted(tmp_path: Path) -> None:
    rows = [{**GOOD, "key": ["x" * 1000]}, {**GOOD, "key": "y" * 1000, "prompt": ""}]
    first = refusal(written(tmp_path, "list.json", json.dumps(rows)))
    assert first == "task 0: key must be a string, not list"
    second = refusal(written(tmp_path, "long.json", json.dumps(rows[1:])))
    assert second == f"task 0 ({'y' * 100}): needs a non-empty string 'prompt'"


def test_lines_that_were_cut_off_are_no_shorter_file(tmp_path: Path) -> None:
    lines = f"{json.dumps(GOOD)}\n\n{json.dumps(OTHER)[:-5]}"
    assert refusal(written(tmp_path, "cut.jsonl", lines)).startswith("line 3: not JSON: ")


def test_a_task_that_is_no_object_is_named_by_its_place(tmp_path: Path) -> None:
    path = written(tmp_path, "tasks.jsonl", f"{json.dumps(GOOD)}\n[1]\n")
    assert refusal(path) == "line 2: expected an object, got list"
    with pytest.raises(TaskFileError, match="line 2: expected an object"):
        read_objects(path)


# Mostly right, so that one wrong or unusual value decides.
NEARLY_RIGHT = st.fixed_dictionaries(
    {name: st.just(GOOD[name]) | JSON for name in GOOD},
    optional={"task_key": st.sampled_from(["a", "b", 0, " ", None]), "env_variables": JSON},
)


@given(st.dictionaries(FIELDS, JSON) | NEARLY_RIGHT)
@settings(max_examples=examples(300), deadline=None)
def test_a_row_of_a_file_is_a_task_exactly_if_an_episode_takes_it(fields: dict[str, Any]) -> None:
    text = json.dumps(fields)
    (row,) = parse_rows(f"[{text}]".encode(), Path("tasks.json"))
    try:
        wanted = parse_task(text)
    except TaskError:
        assert row.task is None
        assert row.fault
    else:
        assert row.task == wanted
        assert parse_task(row.text) == wanted
