"""The steps of the workflow "Fleet Task Training (Tinker)": what they ask of `flotilla`, by a stub
that notes it, and that a run which a job left is resumed, by a real launcher."""

import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from flotilla_common.process.python_command import python_command
from flotilla_common.spec.spec_loading import load_spec
from flotilla_launcher.run_spec import read_spec
from flotilla_launcher.state import RunState
from tests.deploy.workflows.test_steps import checkout, stored_runs
from tests.support.launcher import forged_command, left_running
from tests.support.repository import ROOT

# As the form of a repository with a channel and no other optional secret is filled in.
FORM = {
    "MODALITY": "tool_use",
    "ENV_KEY": "",
    "MAX_TASKS": "",
    "MODEL_NAME": "Qwen/Qwen3-8B",
    "MAX_STEPS": "50",
    "BATCH_SIZE": "8",
    "N_SAMPLES_PER_PROMPT": "4",
    "DATA_VERSION": "",
    "START_OVER": "false",
    "SLACK_CHANNEL": "#fleet-runs",
}
# A value of each input that differs from the form's, and the override that it becomes.
TYPED = {
    "MODALITY": ("computer_use", "--data.modality=computer_use"),
    "ENV_KEY": ("shop,booking", "--data.env=shop,booking"),
    "MAX_TASKS": ("9", "--data.max_tasks=9"),
    "MODEL_NAME": ("Qwen/Qwen3-32B", "--policy.model=Qwen/Qwen3-32B"),
    "MAX_STEPS": ("7", "--learner.steps=7"),
    "BATCH_SIZE": ("16", "--learner.groups_per_step=16"),
    "N_SAMPLES_PER_PROMPT": ("2", "--learner.group_size=2"),
    "DATA_VERSION": ("0.3", '--data.version="0.3"'),
    "TINKER_BASE_URL": ("http://server:8000", "--policy.tinker.url=http://server:8000"),
    "WANDB_API_KEY": ("k", '--learner.tracking.backends=["jsonl", "console", "wandb"]'),
}
# Prints the runs of runs.json, and notes all other commands in calls.txt.
STUB = """if [ "$1" = runs ]; then cat runs.json; else
for word in "$@"; do printf '%s\\n' "$word"; done >> calls.txt; echo >> calls.txt; fi"""


class Job:
    """A runner with its home, and the checkout of one job of the workflow."""

    def __init__(self, folder: Path, program: str = STUB) -> None:
        self.home, self.folder = folder / "home", folder / "job"
        self.home.mkdir(exist_ok=True)
        for part in (".ci", ".venv/bin", "deploy/runs"):
            (self.folder / part).mkdir(parents=True)
        for name in (".ci/submit", ".ci/submit-tinker", "deploy/runs/fleet-tinker.toml"):
            shutil.copy(ROOT / name, self.folder / name)
        python = shlex.join(python_command()[:1])
        for name, text in (("flotilla", program), ("python", f'exec {python} "$@"')):
            path = self.folder / f".venv/bin/{name}"
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(0o755)

    def leave(self, *runs: tuple[str, str, str]) -> None:
        """Have the runner keep runs, the newest first: their ids, names and states."""
        for run_id, _, _ in runs:
            (self.home / "flotilla-tinker" / run_id).mkdir(parents=True)
            (self.home / "flotilla-tinker" / run_id / "spec.json").write_text("{}")
        rows = [{"run_id": i, "name": name, "state": state} for i, name, state in runs]
        (self.folder / "runs.json").write_text(json.dumps({"runs": rows}))

    def environ(self, form: Mapping[str, str]) -> dict[str, str]:
        job = {"PATH": os.environ["PATH"], "HOME": str(self.home), "REQUEST_ID": "gha-1-1"}
        return {**job, **FORM, **form}

    def start(self, step: str = "submit", **form: str) -> subprocess.Popen[str]:
        """Start a step as GitHub does, with the inputs in the environment."""
        return subprocess.Popen(
            ("bash", "-e", "-c", step_of(step)),
            cwd=self.folder,
            env=self.environ(form),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, step: str = "submit", **form: str) -> tuple[int, str]:
        """Run a step to its end; return its exit code and its output."""
        process = self.start(step, **form)
        output, _ = process.communicate()
        return process.returncode, output

    def calls(self) -> list[list[str]]:
        """The commands that `flotilla` got, and forget them."""
        text = (self.folder / "calls.txt").read_text()
        (self.folder / "calls.txt").unlink()
        return [call.splitlines() for call in text.rstrip("\n").split("\n\n")]

    def submitted(self, **form: str) -> list[str]:
        """The one command of a job that finds nothing to resume."""
        code, output = self.run(**form)
        assert code == 0, output
        (call,) = self.calls()
        return call


def step_of(name: str) -> str:
    workflow = yaml.safe_load((ROOT / ".github/workflows/train-tinker.yml").read_text())
    (job,) = workflow["jobs"].values()
    (found,) = [each["run"] for each in job["steps"] if each.get("id") == name]
    return found


def name_in(call: Sequence[str]) -> str:
    (option,) = [word for word in call if word.startswith("--name=")]
    return option.removeprefix("--name=")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_the_form_becomes_a_run_of_the_spec_in_the_runners_home(job: Job) -> None:
    call = job.submitted()
    home = job.home / "flotilla-tinker"
    assert call[:2] == ["submit", "deploy/runs/fleet-tinker.toml"]
    assert call[2:6] == ["--request-id", "gha-1-1", "--runs", str(home)]
    assert "--resume" not in call
    overrides = [word for word in call if word.startswith("--") and "=" in word]
    spec = load_spec(job.folder / "deploy/runs/fleet-tinker.toml", overrides)
    learner = spec["learner"]
    assert (learner["engine"], learner["steps"]) == ("tinker", 50)
    assert (learner["groups_per_step"], learner["group_size"]) == (8, 4)
    assert learner["tracking"]["project"] == "fleet-tinker-grpo"
    config = read_spec(spec).config
    assert (config.backend, config.notify.slack.channel) == ("local", "#fleet-runs")


@pytest.mark.parametrize("variable", sorted(TYPED))
def test_every_input_becomes_its_override(job: Job, variable: str) -> None:
    value, override = TYPED[variable]
    empty = job.submitted()
    call = job.submitted(**{variable: value})
    assert override in call
    assert override not in empty
    other = {"TINKER_BASE_URL", "WANDB_API_KEY"}
    assert (name_in(call) == name_in(empty)) == (variable in other), "inputs name the run"


def test_every_input_of_the_form_is_tried_here() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/train-tinker.yml").read_text())
    (job,) = workflow["jobs"].values()
    (given,) = [each["env"] for each in job["steps"] if each.get("id") == "submit"]
    inputs = {name for name, value in given.items() if "inputs." in value}
    assert inputs - {"START_OVER"} <= set(TYPED)


def test_an_empty_form_leaves_the_spec_as_it_is(job: Job) -> None:
    empty = dict.fromkeys((*TYPED, "SLACK_CHANNEL"), "")
    call = job.submitted(**(empty | {"MODALITY": "tool_use"}))
    changed = [word for word in call if word.startswith("--") and "=" in word]
    assert changed == ["--data.modality=tool_use", f"--name={name_in(call)}"]


def test_a_run_is_named_by_its_modality_and_inputs(job: Job) -> None:
    name = name_in(job.submitted())
    assert name.startswith("fleet-tool-use-")
    assert len(name) == len("fleet-tool-use-") + 8


def test_the_page_of_the_job_and_the_dataset_of_the_repository_are_passed_on(job: Job) -> None:
    call = job.submitted(
        DATA_VERSION="v4",
        DATA_SOURCE="s3://bucket",
        GITHUB_RUN_ID="7",
        GITHUB_SERVER_URL="https://git.example",
        GITHUB_REPOSITORY="team/code",
    )
    assert {'--data.source="s3://bucket"', '--data.version="v4"'} <= set(call)
    link = "https://git.example/team/code/actions/runs/7"
    assert f'--launcher.notify.link="{link}"' in call


def test_what_is_typed_into_a_form_is_never_run(job: Job) -> None:
    evil = "$(touch pwned)`touch pwned`\"; touch pwned; '"
    inputs = dict.fromkeys(("ENV_KEY", "MAX_TASKS", "MODEL_NAME", "MAX_STEPS"), evil)
    call = job.submitted(**inputs, BATCH_SIZE=evil, N_SAMPLES_PER_PROMPT=evil)
    assert f"--learner.steps={evil}" in call
    assert job.run(MODALITY=f"../{evil}")[0] == 2
    assert not (job.folder / "pwned").exists()


@pytest.mark.parametrize(
    ("state", "resumed", "stopped"),
    [
        ("completed", False, False),
        ("failed", True, False),
        ("stopped", True, False),
        # Its job was killed, and its launcher with it.
        ("running", True, True),
        ("draining", True, True),
    ],
)
def test_an_unfinished_run_of_the_same_inputs_is_resumed(
    job: Job, state: str, resumed: bool, stopped: bool
) -> None:
    name = name_in(job.submitted())
    job.leave((f"{name}-2", name, state), (f"{name}-1", name, "failed"), ("a", "b", "failed"))
    code, output = job.run()
    assert code == 0, output
    *before, call = job.calls()
    runs = str(job.home / "flotilla-tinker")
    assert before == ([["stop", f"{name}-2", "--runs", runs]] if stopped else [])
    assert name_in(call) == name
    assert ("--resume" in call) == resumed
    if resumed:
        assert call[call.index("--resume") + 1] == f"{name}-2"


def test_starting_over_resumes_nothing_and_leaves_no_run_going(job: Job) -> None:
    name = name_in(job.submitted())
    job.leave((f"{name}-1", name, "running"))
    assert job.run(START_OVER="true")[0] == 0
    stop, call = job.calls()
    assert stop[:2] == ["stop", f"{name}-1"]
    assert "--resume" not in call


def test_a_run_of_other_inputs_that_was_left_is_stopped_so_that_one_is_billed(job: Job) -> None:
    job.leave(("other-1", "other", "running"))
    assert job.run()[0] == 0
    stop, call = job.calls()
    assert stop[:2] == ["stop", "other-1"]
    assert "--resume" not in call


def test_a_resumed_run_finds_its_tasks_and_a_new_one_fetches_them(job: Job) -> None:
    name = name_in(job.submitted())
    kept = job.home / "flotilla-tinker-data" / f"{name}-1234abcd"
    for state in ("stopped", "completed"):
        kept.mkdir(exist_ok=True)
        shutil.rmtree(job.home / "flotilla-tinker", ignore_errors=True)
        job.leave((f"{name}-1", name, state))
        assert job.run()[0] == 0
        assert (job.folder / "build/data" / kept.name).exists() == (state == "stopped")


def test_runs_that_cannot_be_listed_are_an_error_and_no_new_run(job: Job) -> None:
    job.leave(("other-1", "other", "failed"))
    (job.folder / "runs.json").unlink()
    assert job.run()[0] != 0
    assert not (job.folder / "calls.txt").exists()


def test_a_cancelled_job_stops_its_run_in_the_same_folder(job: Job) -> None:
    assert job.run("cancel")[0] == 0
    assert job.calls() == [["cancel", "gha-1-1", "--runs", str(job.home / "flotilla-tinker")]]


def job_of_fakes(tmp_path: Path) -> Job:
    """A job with the real command, whose spec has fakes for services and takes some seconds."""
    command = shlex.join(forged_command("-m", "flotilla_launcher.cli.app"))
    (tmp_path / "fakes").mkdir()
    fakes = checkout(tmp_path / "fakes/job", steps=40)
    job = Job(tmp_path, f'exec {command} "$@"')
    shutil.copy(fakes / "deploy/runs/fake.toml", job.folder / "deploy/runs/fleet-tinker.toml")
    return job


def test_a_run_whose_job_was_killed_is_resumed_by_the_next_to_its_end(tmp_path: Path) -> None:
    job = job_of_fakes(tmp_path)
    python = {"PYTHONPATH": f"{ROOT}:{ROOT / 'gen'}"}
    form = {**dict.fromkeys(TYPED, ""), **python, "MODALITY": "computer_use", "SLACK_CHANNEL": ""}
    runs = job.home / "flotilla-tinker"
    killed = job.start(**form)
    assert killed.stdout is not None
    assert any("run running" in line for line in killed.stdout)
    os.killpg(killed.pid, signal.SIGKILL)
    for process in left_running(runs):
        process.kill()
    killed.communicate()
    (left,) = stored_runs(runs)
    assert not left.run.state.has_ended
    code, output = job.run(**form, REQUEST_ID="gha-2-1")
    assert code == 0, output
    (stored,) = stored_runs(runs)
    assert (stored.run.run_id, stored.run.state) == (left.run.run_id, RunState.COMPLETED)
    assert stored.run.name.startswith("fleet-computer-use-")
