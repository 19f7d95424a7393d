"""Any text is a task in Fleet's JSON, or is refused with a precise error."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_common.tasks.task_format import TaskError, parse_task
from tests.support.examples import examples
from tests.support.fake_gateway import task_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
FIELDS = st.sampled_from(
    ["key", "task_key", "prompt", "env_id", "env_key", "version", "data_id", "env_variables"]
)


@given(st.text() | st.dictionaries(FIELDS, JSON).map(json.dumps))
@settings(max_examples=examples(300), deadline=None)
def test_any_text_is_a_task_or_a_precise_error(text: str) -> None:
    try:
        task = parse_task(text)
    except TaskError as error:
        assert str(error)
    else:
        assert task.key and task.prompt and task.env_key


def test_both_vocabularies_mean_the_same_task() -> None:
    sdk = parse_task(
        task_json(version="v1", data_id="d", verifier_func="def v(env): ...", env_variables={})
    )
    other = parse_task(
        json.dumps(
            {
                "task_key": "task-1",
                "prompt": "Count to one.",
                "env_key": "fake",
                "env_version": "v1",
                "data_key": "d",
                "verifier_code": "def v(env): ...",
                "env_variables": "{}",
            }
        )
    )
    assert sdk == other


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env_id": None}, r"env_id \(or env_key\) is missing"),
        ({"env_key": "other"}, "same field with two values"),
        ({"prompt": " \n"}, "prompt is missing or empty"),
        ({"key": "\t"}, r"key \(or task_key\) is missing or empty"),
        ({"prompt": 5.5}, "prompt must be a string, not float"),
        ({"verifier_func": 5}, "verifier_func must be a string, not int"),
        ({"passes_untouched": "no"}, "passes_untouched must be true or false"),
        ({"verifer_func": "x"}, "unknown field 'verifer_func'; did you mean 'verifier_func'"),
        ({"mine": 1}, "unknown field 'mine'.* belongs in `metadata`"),
        ({"env_id": "../../etc"}, "must be letters"),
        ({"env_variables": [1]}, "env_variables must be an object"),
        ({"env_variables": "{"}, "env_variables is not JSON"),
        ({"prompt": "\ud800"}, "prompt holds a lone surrogate"),
    ],
)
def test_a_task_error_names_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        parse_task(task_json(**changes))


def test_variables_are_text_and_the_date_is_apart() -> None:
    task = parse_task(
        task_json(env_variables='{"CURRENT_DATE": "2026-02-14T10:00:00", "N": 3, "L": ["a"]}')
    )
    assert task.current_date == "2026-02-14"
    assert task.variables == {"N": "3", "L": '["a"]'}
