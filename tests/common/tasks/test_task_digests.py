"""Equal tasks have one digest, however they are written, and others have not."""

import json
from typing import Any

import pytest

from flotilla_common.tasks.task_digests import question_digest, task_digest
from flotilla_common.tasks.task_format import parse_task

TASK = {
    "key": "a",
    "prompt": "Book a room.",
    "env_id": "booking",
    "version": "2",
    "data_id": "d",
    "data_version": "v1",
    "verifier_func": "def v(env): ...",
    "env_variables": {"CURRENT_DATE": "2026-02-14", "USER": "ann"},
    "difficulty": 2,
    "metadata": {"by": ["me"]},
}


def digests(fields: dict[str, Any]) -> tuple[str, str]:
    task = parse_task(json.dumps(fields))
    return task_digest(task, fields), question_digest(task)


def test_a_task_has_one_digest_in_both_vocabularies_and_in_any_order() -> None:
    other = {
        "metadata": {"by": ["me"]},
        "task_key": "a",
        "prompt": "Book a room.",
        "env_key": "booking",
        "env_version": 2,
        "data_key": "d",
        "data_version": "v1",
        "verifier_code": "def v(env): ...",
        "env_variables": json.dumps({"USER": "ann", "CURRENT_DATE": "2026-02-14"}),
        "task_modality": "tool_use",
        "difficulty": 2,
        "created_at": None,
    }
    assert digests(other) == digests(TASK)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": "Book a room"},
        {"env_id": "shop"},
        {"version": "3"},
        {"data_id": "e"},
        {"data_version": "v2"},
        {"env_variables": {"CURRENT_DATE": "2026-02-15", "USER": "ann"}},
        {"env_variables": {"CURRENT_DATE": "2026-02-14"}},
    ],
)
def test_another_question_is_another_task(changes: dict[str, Any]) -> None:
    whole, question = digests({**TASK, **changes})
    assert whole != digests(TASK)[0]
    assert question != digests(TASK)[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"key": "b"},
        {"verifier_func": "def w(env): ..."},
        {"offered_tools": ["find"]},
        {"servers": ["desk"]},
        {"difficulty": 3},
        {"metadata": {}},
        {"passes_untouched": True},
    ],
)
def test_another_key_verifier_or_note_asks_the_same_question(changes: dict[str, Any]) -> None:
    whole, question = digests({**TASK, **changes})
    assert whole != digests(TASK)[0]
    assert question == digests(TASK)[1]
