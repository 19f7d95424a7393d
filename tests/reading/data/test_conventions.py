"""Rows of others become tasks that the env_gateway accepts, or say why they cannot.

The rows are as the projects' own documents and scripts write them."""

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.tasks.task_files import TaskRow
from flotilla_common.tasks.task_format import Task
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_reading.data.conventions import NO_DEFAULTS, Defaults
from flotilla_reading.data.row_files import parse_file
from flotilla_reading.data.sources import fetch_source
from tests.support.fake_gateway import open_spec, opened
from tests.support.grading_gateway import EmbeddedBackend, EmbeddedConfig, grading_gateway

Row = dict[str, Any]
# verl, examples/data_preprocess/math_dataset.py.
VERL: Row = {
    "data_source": "DigitalLearningGmbH/MATH-lighteval",
    "prompt": [{"role": "user", "content": "What is half of 3? Put it within \\boxed{}."}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "\\frac{3}{2}"},
    "extra_info": {"split": "train", "index": 7},
}
# SkyRL, skyrl-train/docs/datasets/dataset-preparation.rst.
SKYRL: Row = {
    "data_source": "synsql",
    "prompt": [
        {"role": "system", "content": "Write SQL."},
        {"role": "user", "content": "How many users?"},
    ],
    "env_class": "text2sql",
    "reward_spec": {"method": "rule", "ground_truth": "SELECT 1"},
    "db_id": "users",
}
SKYRL_GSM8K: Row = {
    **SKYRL,
    "env_class": "gsm8k",
    "reward_spec": {"method": "rule", "ground_truth": "1200"},
    "extra_info": {"split": "test", "index": 3},
}
# Fleet's `prepare_dataset`, of May.
SKYRL_FLEET: Row = {
    "prompt": [{"role": "user", "content": "Book it."}],
    "env_class": "fleet_task",
    "task_key": "task_a",
    "data_source": "booking",
    "data_key": "kinesis",
    "env_variables": '{"CURRENT_DATE": "2026-02-14"}',
}
# TRL, docs/source/grpo_trainer.md.
TRL: Row = {"prompt": [{"role": "user", "content": "Play."}], "environment": "game", "level": 2}
FLEET: Row = {
    "key": "a",
    "prompt": "do it",
    "environment_id": "shop",
    "verifier": {"code": "def check(env): return 1"},
}


def rows_of(*rows: Row, defaults: Defaults = NO_DEFAULTS) -> list[TaskRow]:
    return list(parse_file("rows.json", json.dumps(rows).encode(), defaults))


def task_of(row: Row, defaults: Defaults = NO_DEFAULTS) -> Task:
    (read,) = rows_of(row, defaults=defaults)
    assert read.task is not None, read.fault
    return read.task


def fault_of(row: Row, defaults: Defaults = NO_DEFAULTS) -> str:
    (read,) = rows_of(row, defaults=defaults)
    assert (read.task, read.key != "") == (None, True)
    return read.fault


def test_a_row_of_verl_is_a_question_and_its_answer_is_in_the_verifier_only() -> None:
    task = task_of(VERL)
    assert task.key == "DigitalLearningGmbH/MATH-lighteval-train-7"
    assert (task.env_key, task.modality) == ("questions", "single_turn")
    assert task.prompt == VERL["prompt"][0]["content"]
    assert task.verifier is not None
    assert f"EXPECTED = {VERL['reward_model']['ground_truth']!r}\n" in task.verifier
    assert (dict(task.variables), task.data_key) == ({}, "")


@pytest.mark.parametrize(
    ("row", "answer", "reward"),
    [
        (VERL, "It is \\boxed{\\dfrac{3}{2}}.", 1),
        (VERL, "It is \\boxed{1.5}", 1),
        (VERL, "\\boxed{\\frac{3}{2}}, no: \\boxed{2}", 0),
        (VERL, "\\frac{3}{2}", 0),
        (SKYRL_GSM8K, "so\n#### 1,200", 1),
        (SKYRL_GSM8K, "so\n#### 1201", 0),
        (SKYRL_GSM8K, "", 0),
    ],
)
async def test_a_question_of_others_is_played_and_graded_by_the_gateway(
    row: Row, answer: str, reward: int
) -> None:
    (read,) = rows_of(row)
    config = EnvGatewayConfig.model_validate({"verifiers": {"unsafe_local_verifiers": True}})
    backend = EmbeddedBackend(EmbeddedConfig())
    try:
        async with grading_gateway({"embedded": backend}, config) as gateway:
            session = await opened(gateway, open_spec(task=read.text))
            grade = await gateway.grade_episode(session, answer, None, 30.0)
            gateway.close(session.episode.episode_id)
    finally:
        await backend.close()
    assert (grade.reward, grade.reason) == (reward, None), grade.detail


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"reward_model": {"style": "model"}}, "style is 'model', so a model of verl's grades it"),
        ({"ability": "code"}, "ability 'code' is graded by verl's own function"),
        ({"reward_model": {"style": "rule", "ground_truth": ["a"]}}, "ground_truth is list"),
        ({"reward_model": {"style": "rule"}}, "ground_truth is NoneType"),
        ({"extra_info": {"need_tools_kwargs": True}}, "it needs tools of verl's"),
        ({"images": [{"bytes": "x"}]}, "its prompt shows images"),
        ({"prompt": [{"role": "assistant", "content": "x"}]}, "a message of 'assistant'"),
        ({"prompt": [{"role": "user", "content": [{}]}]}, "a message that is not text"),
        ({"prompt": []}, "needs a non-empty string 'prompt'"),
    ],
)
def test_a_row_of_verl_that_cannot_be_graded_here_says_why(changes: Row, why: str) -> None:
    assert why in fault_of({**VERL, **changes})


def test_a_row_of_skyrl_is_a_task_of_its_environment_whose_extras_reach_no_policy() -> None:
    task = task_of(SKYRL)
    assert (task.env_key, task.modality, task.verifier) == ("text2sql", "tool_use", None)
    assert task.prompt == "Write SQL.\n\nHow many users?"
    assert dict(task.variables) == {}
    (read,) = rows_of(SKYRL)
    assert read.fields["metadata"] == {
        name: SKYRL[name] for name in ("data_source", "reward_spec", "db_id")
    }
    assert task.key == task_of(dict(reversed(SKYRL.items()))).key
    assert task.key != task_of({**SKYRL, "db_id": "other"}).key
    assert "reward_spec.method is 'reward_model'" in fault_of(
        {**SKYRL_GSM8K, "reward_spec": {"method": "reward_model"}}
    )


def test_a_row_of_fleets_own_preparation_needs_the_verifier_that_it_leaves_out() -> None:
    assert "prepare the task file that it was made from" in fault_of(SKYRL_FLEET)
    task = task_of({**SKYRL_FLEET, "verifier_code": "def check(env): return 1"})
    assert (task.key, task.env_key, task.data_key) == ("task_a", "booking", "kinesis")
    assert task.current_date == "2026-02-14"


def test_a_row_of_trl_is_a_task_of_its_environment_or_of_the_one_that_is_named() -> None:
    (read,) = rows_of({**TRL, "tools": ["move", {"function": {"name": "look"}}, {"name": "go"}]})
    assert read.task is not None
    assert (read.task.env_key, read.task.prompt) == ("game", "Play.")
    assert read.task.offered_tools == ("move", "look", "go")
    assert read.fields["metadata"] == {"level": 2}
    bare = {"prompt": TRL["prompt"], "solution": "4"}
    assert "it names no environment" in fault_of(bare)
    assert task_of(bare, Defaults(env="sums")).env_key == "sums"
    assert "tools must be a list" in fault_of({**TRL, "tools": [3]})


def harbor_task(folder: Path, config: str = "") -> None:
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(config or 'version = "1.0"\n')
    (folder / "instruction.md").write_text("Create hello.txt.\n")
    (folder / "tests/test.sh").write_text("exit 0\n")


def test_folders_of_harbor_need_an_environment_that_runs_them(tmp_path: Path) -> None:
    harbor_task(tmp_path / "tasks/hello", '[metadata]\ndifficulty = "easy"\n')
    harbor_task(tmp_path / "tasks/named", '[task]\nname = "org/named"\n')
    found = fetch_source(str(tmp_path / "tasks"), lambda *_: None)
    assert (found.kind, len(found.files)) == ("harbor", 1)
    faults = [
        (row.key, "run by no backend of the env_gateway" in row.fault, row.task)
        for row in found.read_rows()
    ]
    assert faults == [("hello", True, None), ("named", True, None)]
    first, second = (row.task for row in found.read_rows(Defaults(env="harbor")))
    assert first is not None and second is not None
    assert (first.key, first.env_key, first.data_key) == ("hello", "harbor", "hello")
    assert first.prompt == "Create hello.txt.\n"
    assert (second.key, second.data_key) == ("org/named", "named")
    (alone,) = fetch_source(str(tmp_path / "tasks/hello"), lambda *_: None).read_rows()
    assert alone.key == "hello"


@pytest.mark.parametrize(
    "verifier", [None, {}, {"code": " "}, {"code": "<error loading code: NoSuchKey>"}]
)
def test_a_task_of_fleet_whose_verifier_cannot_be_read_is_a_fault(verifier: Any) -> None:
    assert "no verifier that can be read" in fault_of({**FLEET, "verifier": verifier})


def test_modality_and_difficulty_are_a_fleet_tasks_own_where_it_states_them() -> None:
    assert task_of(FLEET, Defaults(modality="computer_use")).modality == "computer_use"
    metadata = {"task_modality": "browser_use", "difficulty": 2}
    (own,) = rows_of({**FLEET, "metadata": metadata, "difficulty": 3})
    assert own.task is not None
    assert (own.task.modality, own.fields["difficulty"]) == ("browser_use", 3)


def test_the_first_row_decides_and_an_odd_one_is_a_fault_of_its_own() -> None:
    rows = rows_of(VERL, {"key": "a", "prompt": "x", "env_id": "shop"}, VERL)
    assert [row.task is not None for row in rows] == [True, False, True]
    assert "reward_model.style is None" in rows[1].fault
    (number,) = parse_file("x.json", b"[3]")
    assert number.fault == "expected an object, got int"
    lines = f'{json.dumps(VERL)}\n3\n{{"a": NaN}}\n'.encode()
    assert [row.fault != "" for row in parse_file("x.jsonl", lines)] == [False, True, True]
