"""`[data]` of a spec is short for a command of `[[prepare]]` and for the files that it makes."""

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.data_table import expand_data_table
from flotilla_common.spec.spec_loading import load_spec
from flotilla_launcher.run_spec import parse_spec

TOML = """
name = "mine"
[data]
source = "tasks.json"
env = ["shop", "booking"]
difficulty = [1, 2]
max_tasks = 100
eval_ratio = 0.2
strict = true
[learner]
steps = 3
[[learner.eval.sets]]
name = "heldout"
[[learner.eval.sets]]
name = "others"
tasks = "others.json"
"""


def load(tmp_path: Path, *overrides: str, text: str = TOML) -> dict[str, Any]:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load_spec(path, overrides)


def test_it_becomes_a_command_and_the_files_that_it_makes(tmp_path: Path) -> None:
    spec = load(tmp_path)
    (made,) = spec["prepare"]
    folder = made["creates"]
    assert folder.startswith("build/data/mine-")
    assert made["command"] == [
        *("flotilla", "data", "prepare", "--out", folder),
        *("--env=shop,booking", "--difficulty=1,2", "--max-tasks=100", "--eval-ratio=0.2"),
        *("--strict", "--", "tasks.json"),
    ]
    assert made["needs"] == ["tasks.json"]
    learner = spec["learner"]
    assert learner["tasks"] == f"{folder}/train.jsonl"
    assert learner["data"] == f"{folder}/manifest.json"
    assert [each["tasks"] for each in learner["eval"]["sets"]] == [
        f"{folder}/eval.jsonl",
        "others.json",
    ]
    stored = tmp_path / "spec.json"
    stored.write_text(json.dumps(spec))
    assert load_spec(stored) == spec, "every service loads a run's own spec again"


def test_nothing_is_a_wish_too(tmp_path: Path) -> None:
    wishes = ("eval_ratio", "eval_max", "max_eval", "max_tasks", "eval_min", "max_env_share")
    (made,) = load(tmp_path, *(f"data.{wish}=0" for wish in wishes))["prepare"]
    for wish in wishes:
        option = f"--{wish.replace('_', '-')}"
        assert f"{option}=0" in [each.removesuffix(".0") for each in made["command"]]


@pytest.mark.parametrize("prepare", [5, "ab", {"creates": "x"}, None])
def test_other_commands_that_are_no_list_are_named(prepare: Any) -> None:
    with pytest.raises(ConfigError, match=r"spec: prepare: write \[\[prepare\]\]"):
        expand_data_table({"data": {"source": "x"}, "prepare": prepare}, where="spec")


def test_other_wishes_never_find_the_data_of_earlier_ones(tmp_path: Path) -> None:
    folders = {
        load(tmp_path, *overrides)["prepare"][0]["creates"]
        for overrides in ((), ("--data.max_tasks=99",), ("--data.version=v4",), ("--name=other",))
    }
    assert len(folders) == 4
    assert load(tmp_path)["prepare"] == load(tmp_path)["prepare"]


def test_a_list_may_be_written_as_a_form_sends_it(tmp_path: Path) -> None:
    command = load(tmp_path, "--data.env=shop", "--data.difficulty=2")["prepare"][0]["command"]
    assert {"--env=shop", "--difficulty=2"} <= set(command)


def test_all_that_is_read_here_is_compared(tmp_path: Path) -> None:
    (made,) = load(tmp_path, "--data.quarantine=rules.jsonl", "--data.keep_split=old")["prepare"]
    assert made["needs"] == ["tasks.json", "rules.jsonl", "old"]


@pytest.mark.parametrize(
    ("source", "variables"),
    [
        ("s3://bucket/tasks.json", ["AWS_*", "S3_*"]),
        ("gcs://bucket/tasks.json", ["GOOGLE_*", "GCS_*"]),
        ("abfss://container/tasks.json", ["AZURE_*"]),
        ("fleet:", ["FLEET_*"]),
        ("hf://datasets/owner/name", []),
        ("/data/tasks.json", []),
    ],
)
def test_a_source_elsewhere_is_no_file_to_compare_and_has_its_variables(
    tmp_path: Path, source: str, variables: list[str]
) -> None:
    (made,) = load(tmp_path, f"--data.source={source}")["prepare"]
    assert (made["needs"], made["variables"]) == ([], variables)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--data.sorce=x", "data.sorce: unknown key; did you mean 'source'?"),
        ("--data.max_tasks=many", "data.max_tasks: "),
        ("--data.source=", "data.source: "),
        ("--learner.tasks=x.json", "[data] makes learner.tasks: leave out the one or the other"),
        ("--data=7", "data: expected a table"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(tmp_path, override)
    assert message in str(raised.value)


def test_a_spec_that_a_client_sends_may_have_it_too() -> None:
    sent = {"name": "n", "policy": {"model": "m", "max_model_len": 1}, "data": {"source": "fleet:"}}
    read = parse_spec(json.dumps(sent))
    assert "data" not in read.tables
    assert read.tables["learner"]["data"].endswith("/manifest.json")
