"""The settings of a whole run on one machine: by overrides of its plan or `sky launch --env`,
from its script to the learner."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from flotilla_common.spec.config import parse_config
from flotilla_common.spec.spec_loading import load_spec
from flotilla_launcher.backends.sky import single_machine
from flotilla_launcher.cli import app, plan, train
from flotilla_launcher.cli.train import TrainOptions
from flotilla_launcher.doctor.findings import Finding
from flotilla_launcher.doctor.run_context import RunContext
from flotilla_launcher.run_spec import RunSpec, read_spec
from flotilla_launcher.security.service_variables import variables_of_any_service
from flotilla_learner.config.learner import LearnerConfig
from flotilla_rollout.config.rollout import RolloutConfig
from tests.support.repository import ROOT

FILE = ROOT / "deploy/sky/openenv-fleet-grpo.yaml"
SPEC = ROOT / "deploy/runs/openenv-fleet-grpo.toml"


def started(
    tmp_path: Path, chosen: dict[str, str], file: Path = FILE
) -> subprocess.CompletedProcess[str]:
    """The task's script, run as on its machine, with an interpreter that prints its arguments."""
    task = yaml.safe_load(file.read_text())
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    python.chmod(0o755)
    return subprocess.run(
        ("bash", "-c", task["run"]),
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], **task["envs"], **chosen},
        check=True,
        capture_output=True,
        text=True,
    )


def arguments_of(tmp_path: Path, file: Path = FILE, /, **chosen: str) -> list[str]:
    """The arguments that the task's script passes to `flotilla`."""
    safe, option, module, *arguments = started(tmp_path, chosen, file).stdout.split("\0")[:-1]
    assert (safe, option, module) == ("-P", "-m", "flotilla_launcher.cli.app")
    return arguments


def planned(out: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> Path:
    """The file that the command writes with overrides."""

    async def content(_: RunSpec) -> None:
        """Skip the services' checks, which take seconds."""

    async def read_nothing(_: RunContext) -> tuple[dict[str, Any], list[Finding]]:
        """Return no section; the services would take seconds to list theirs."""
        return {}, []

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(plan.spec_check, "check_spec", content)
    monkeypatch.setattr(plan.plan_memory, "read_sections", read_nothing)
    words = ("plan", "deploy/runs/openenv-fleet-grpo.toml", "--one-machine", "--out", str(out))
    result = CliRunner().invoke(app.app, [*words, *overrides])
    assert result.exit_code == 0, result.output
    return out / FILE.name


def request(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], str | None]:
    """The spec of the run, and the run to resume, as parsed by the command line."""
    found: list[tuple[dict[str, Any], str | None]] = []

    def take(path: Path, runs: Path, overrides: list[str], options: TrainOptions) -> int:
        resumed = options.run_id or None
        assert options == TrainOptions(resume=resumed is not None, run_id=options.run_id)
        found.append((load_spec(ROOT / path, overrides), resumed))
        return 0

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(train, "train_policy", take)
    result = CliRunner().invoke(app.app, arguments)
    assert result.exit_code == 0, result.output
    return found[0]


def prepared(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The options with which the run's data are prepared."""
    (made,) = request(arguments, monkeypatch)[0]["prepare"]
    return made["command"][5:-2]


@pytest.mark.parametrize("version", ["0.3", "3", "true", "2026-01-31", "v1.2", "v'1"])
def test_a_data_version_stays_text_whatever_it_looks_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    arguments = arguments_of(tmp_path, DATA_VERSION=version)
    assert f"--data-version={version}" in prepared(arguments, monkeypatch)


def test_the_choices_come_to_the_data_and_none_of_them_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {"MODALITY": "tool_use", "ENV_KEYS": "shop, booking", "DIFFICULTY": "2,3"}
    evil = '$(touch pwned)`touch pwned`"; touch pwned; \\'
    arguments = arguments_of(tmp_path, MAX_TASKS="100", DATA_VERSION=evil, **chosen)
    assert prepared(arguments, monkeypatch) == [
        *("--data-version=$(touch pwned)`touch pwned`; touch pwned; ", "--modality=tool_use"),
        *("--env=shop,booking", "--difficulty=2,3", "--max-tasks=100"),
        *("--eval-ratio=0.2", "--eval-min=1"),
    ]
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("url", ["s3://bucket/prefix", "file:///a b'$(touch pwned)`touch pwned`"])
def test_where_the_model_is_kept_is_chosen_at_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    spec, _ = request(arguments_of(tmp_path, CHECKPOINT_REMOTE=url), monkeypatch)
    assert spec["learner"]["checkpoint"]["remote"] == url
    assert not (tmp_path / "pwned").exists()


def test_keys_that_may_be_left_out_are_variables_which_env_and_secret_both_set() -> None:
    """SkyPilot 0.14.1 runs a task with `{**envs, **secrets}`: an empty secret would hide what
    `--env` gives, and a secret without a value is refused unless `--secret` gives it."""
    task = yaml.safe_load(FILE.read_text())
    assert task["secrets"] == {"FLEET_API_KEY": None}
    for name in ("WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"):
        assert task["envs"][name] == ""


# A value of each variable of the file that is no key, and what the run's spec has then.
CHOSEN: dict[str, tuple[str, Any]] = {
    "MODALITY": ("computer_use", "--modality=computer_use"),
    "ENV_KEYS": ("shop", "--env=shop"),
    "DIFFICULTY": ("2", "--difficulty=2"),
    "MAX_TASKS": ("9", "--max-tasks=9"),
    "DATA_SOURCE": ("s3://bucket", "s3://bucket"),
    "DATA_VERSION": ("v4", "--data-version=v4"),
    "STEPS": ("7", 7),
    "MAX_TURNS": ("5", 5),
    "MAX_INPUT_LENGTH": ("4096", 4096),
    "MAX_GENERATE_LENGTH": ("512", 512),
    "CHECKPOINT_REMOTE": ("s3://bucket/prefix", "s3://bucket/prefix"),
}


def test_every_variable_of_the_file_has_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = yaml.safe_load(FILE.read_text())
    choices = single_machine.choices_of(read_spec(load_spec(SPEC)))
    assert set(CHOSEN) == set(choices)
    values = {name: value for name, (value, _) in CHOSEN.items()}
    arguments = arguments_of(tmp_path, WANDB_API_KEY="k", RESUME_RUN_NAME="run-1", **values)
    spec, resumed = request(arguments, monkeypatch)
    assert resumed == "run-1"
    (made,) = spec["prepare"]
    for name, key in choices.items():
        if key.startswith("data."):
            assert CHOSEN[name][1] in made["command"]
            continue
        found: Any = spec
        for part in key.split("."):
            found = found[part]
        assert found == CHOSEN[name][1], name
    # The services take these values, and get the keys.
    parse_config(LearnerConfig, spec["learner"], where="learner")
    parse_config(RolloutConfig, spec["rollout"], where="rollout")
    keys = {*task["envs"], *task["secrets"]} - {*CHOSEN, single_machine.RESUME}
    assert keys <= set(variables_of_any_service(read_spec(spec)))


def test_a_key_of_wandb_adds_it_to_the_trackers_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backends(folder: str, file: Path, **chosen: str) -> Any:
        spec, _ = request(arguments_of(tmp_path / folder, file, **chosen), monkeypatch)
        return spec["learner"].get("tracking", {}).get("backends")

    assert backends("without", FILE) is None
    assert backends("with", FILE, WANDB_API_KEY="k") == ["jsonl", "console", "wandb"]
    own = "--learner.tracking.backends=['jsonl', 'tensorboard']"
    file = planned(tmp_path / "out", monkeypatch, own)
    assert backends("own", file) == ["jsonl", "tensorboard"]
    assert backends("more", file, WANDB_API_KEY="k") == ["jsonl", "tensorboard", "wandb"]


@pytest.mark.parametrize("name", single_machine.REFUSED)
def test_a_variable_that_would_be_ignored_ends_the_setup_before_it_installs_anything(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy/setup-machine.sh").write_text("touch installed\n")
    setup = yaml.safe_load(FILE.read_text())["setup"]

    def run_setup(**chosen: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ("bash", "-c", setup),
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], **chosen},
            check=False,
            capture_output=True,
            text=True,
        )

    refused = run_setup(**{name: "3"})
    assert refused.returncode == 1
    assert f"error: {name} is not supported: " in refused.stderr
    assert not (tmp_path / "installed").exists()
    assert run_setup().returncode == 0
    assert (tmp_path / "installed").exists()


@pytest.mark.parametrize(
    ("chosen", "warned"),
    [
        ({}, True),
        ({"RESUME_RUN_NAME": "openenv-fleet-grpo-1"}, True),
        ({"CHECKPOINT_REMOTE": "s3://bucket/prefix"}, False),
        ({"RESUME_RUN_NAME": "s3://bucket/prefix/openenv-fleet-grpo-1"}, False),
    ],
)
def test_a_run_that_keeps_nothing_warns_at_its_start(
    tmp_path: Path, chosen: dict[str, str], warned: bool
) -> None:
    printed = started(tmp_path, chosen).stderr
    assert ("all checkpoints go with the learner's machine; to keep them" in printed) == warned
    assert ("launch with --env CHECKPOINT_REMOTE=" in printed) == warned


def test_the_overrides_of_a_plan_are_those_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = '--env_gateway.backends.fleet.region="$(touch pwned) `touch pwned`"'
    remote = "--learner.checkpoint.remote=s3://bucket/prefix"
    cloud = "--launcher.sky.cloud=lambda"
    file = planned(tmp_path / "out", monkeypatch, "--learner.steps=7", remote, evil, cloud)
    done = started(tmp_path / "machine", {}, file)
    spec, _ = request(done.stdout.split("\0")[3:-1], monkeypatch)
    assert spec["learner"]["steps"] == 7
    assert spec["learner"]["checkpoint"]["remote"] == "s3://bucket/prefix"
    assert spec["env_gateway"]["backends"]["fleet"]["region"] == "$(touch pwned) `touch pwned`"
    assert spec["launcher"]["backend"] == "local"
    assert done.stderr == ""
    machines = yaml.safe_load(file.read_text())["resources"]["any_of"]
    assert {machine["infra"] for machine in machines} == {"lambda"}


def test_what_a_launch_chooses_goes_before_the_overrides_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ("--data.max_tasks=5", "--learner.steps=7")
    file = planned(tmp_path / "out", monkeypatch, *overrides)
    chosen = {"MAX_TASKS": "100", "RESUME_RUN_NAME": "openenv-fleet-grpo-1"}
    spec, resumed = request(arguments_of(tmp_path / "machine", file, **chosen), monkeypatch)
    assert "--max-tasks=100" in spec["prepare"][0]["command"]
    assert spec["learner"]["steps"] == 7
    assert resumed == "openenv-fleet-grpo-1"


def test_the_first_line_of_a_file_is_the_command_that_makes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quoted = "--env_gateway.backends.fleet.region=a b's"
    file = planned(tmp_path, monkeypatch, "--learner.steps=7", quoted)
    made = file.read_text()
    file.unlink()
    program, *words = shlex.split(made.splitlines()[0].removeprefix("# Made by: "))
    assert program == "flotilla"
    assert CliRunner().invoke(app.app, words).exit_code == 0
    assert file.read_text() == made
