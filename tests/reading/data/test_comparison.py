"""Two sets of tasks are told apart by key and digest."""

import json
from collections.abc import Sequence

from flotilla_common.tasks.task_files import ReadTask
from flotilla_common.tasks.task_format import parse_task
from flotilla_reading.data.comparison import compare
from tests.reading.data.made_tasks import Row, make_row


def tasks(*rows: Row) -> Sequence[ReadTask]:
    texts = [json.dumps(row) for row in rows]
    return [ReadTask(parse_task(text), text) for text in texts]


def test_tasks_are_added_removed_changed_and_moved() -> None:
    a, b, c, d = (make_row(key) for key in "abcd")
    first = {"train": tasks(a, b), "eval": tasks(c)}
    second = {"train": tasks(c, {**b, "difficulty": 2}), "eval": tasks(d)}
    found = compare(first, second)
    assert (found.added, found.removed, found.changed) == (["d"], ["a"], ["b"])
    assert found.moved == {"c": ("eval", "train")}
    assert found.unchanged == 0


def test_a_file_has_no_parts_to_move_between_and_vocabulary_is_no_change() -> None:
    other = {"task_key": "a", "prompt": "Do a.", "env_key": "shop"}
    found = compare({"": tasks(make_row("a"))}, {"eval": tasks(other)})
    assert (found.added, found.removed, found.changed, found.moved) == ([], [], [], {})
    assert found.unchanged == 1
