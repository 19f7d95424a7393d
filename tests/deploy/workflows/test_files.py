"""The workflow files, read without a runner."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.repository import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
INPUTS = {
    *("modality", "env_key", "env_keys", "difficulty", "max_tasks", "cloud", "task_name"),
    *("data_version", "resume_run_name", "max_cost", "disable_slack"),
}
SECRETS = {
    *("FLEET_API_KEY", "WANDB_API_KEY_TOOL_USE", "WANDB_API_KEY_COMPUTER_USE", "LAMBDA_API_KEY"),
    *("RUNPOD_API_KEY", "VAST_API_KEY", "PRIME_INTELLECT_API_KEY", "NEBIUS_CREDENTIALS_JSON"),
    *("NEBIUS_TENANT_ID", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "SLACK_BOT_TOKEN"),
    *("CHECKPOINT_REMOTE", "DATA_SOURCE", "SLACK_CHANNEL", "FLOTILLA_LAUNCHER"),
}
# Of "Fleet Task Training (Tinker)".
TINKER_INPUTS = {
    *("modality", "env_key", "max_tasks", "model_name", "max_steps", "batch_size"),
    *("n_samples_per_prompt", "data_version", "start_over"),
}
TINKER_SECRETS = {
    *("TINKER_API_KEY", "TINKER_BASE_URL", "FLEET_API_KEY", "WANDB_API_KEY_TOOL_USE"),
    *("WANDB_API_KEY_COMPUTER_USE", "DATA_SOURCE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    *("SLACK_BOT_TOKEN", "SLACK_CHANNEL"),
}
# What a job may do beyond reading, by workflow and job: a release is published without a password.
WRITERS = {
    "release": {
        "pypi": {"contents": "read", "id-token": "write"},
        "images": {"contents": "read", "packages": "write"},
        "page": {"contents": "write"},
    }
}


def read(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text())


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in read(path)["jobs"].values() for step in job["steps"]]


def train(stem: str = "train-skypilot") -> dict[Any, Any]:
    return read(ROOT / f".github/workflows/{stem}.yml")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_read_and_no_more_and_ends(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert all(job["timeout-minutes"] for job in workflow["jobs"].values())
    allowed = {
        name: job["permissions"] for name, job in workflow["jobs"].items() if "permissions" in job
    }
    assert allowed == WRITERS.get(path.stem, {})


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_nothing_from_outside_becomes_part_of_a_program(path: Path) -> None:
    for step in steps(path):
        assert "${{" not in step.get("run", "")
        assert "secrets" not in step.get("run", "")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_every_action_is_pinned_to_a_commit_and_keeps_no_credentials(path: Path) -> None:
    for step in steps(path):
        if "uses" not in step:
            continue
        assert re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step["uses"])
        if "checkout" in step["uses"]:
            assert step["with"]["persist-credentials"] is False


def request(stem: str = "train-skypilot") -> dict[str, Any]:
    """The inputs of a training workflow. YAML 1.1 reads `on` as true."""
    return train(stem)[True]["workflow_dispatch"]["inputs"]


def test_the_training_workflow_takes_what_it_is_known_to_take() -> None:
    assert train()["name"] == "Fleet Task Training (SkyPilot)"
    assert set(request()) == INPUTS
    assert all("default" in each for each in request().values())


def test_every_spec_that_may_be_chosen_is_there() -> None:
    task_name = request()["task_name"]
    assert task_name["default"] in task_name["options"]
    for name in task_name["options"]:
        assert (ROOT / f"deploy/runs/{name}.toml").is_file()


def named_step(name: str, stem: str = "train-skypilot") -> dict[str, Any]:
    (job,) = train(stem)["jobs"].values()
    (found,) = [step for step in job["steps"] if step.get("id") == name]
    return found


def unread(step: dict[str, Any], variables: set[str]) -> set[str]:
    """Return the variables that the step's script does not name."""
    script = (ROOT / step["run"]).read_text() + (ROOT / ".ci/submit").read_text()
    return {name for name in variables if not re.search(rf"\b{name}\b", script)}


def test_every_input_reaches_the_step_that_submits_and_is_read() -> None:
    submit = named_step("submit")
    text = " ".join(str(value) for value in submit["env"].values())
    assert {name for name in INPUTS if f"inputs.{name} " in text} == INPUTS
    variables = {name for name, value in submit["env"].items() if "inputs." in value}
    assert unread(submit, variables | {"CHECKPOINT_REMOTE", "SLACK_CHANNEL"}) == set()


def test_no_spec_that_may_be_chosen_loses_a_tracker_to_a_key_of_wandb() -> None:
    """The step lists them anew."""
    for name in request()["task_name"]["options"]:
        spec = tomllib.loads((ROOT / f"deploy/runs/{name}.toml").read_text())
        named = spec["learner"].get("tracking", {}).get("backends", [])
        assert set(named) <= {"jsonl", "console", "wandb"}, name


def test_every_secret_reaches_the_step_that_needs_it_and_no_other() -> None:
    submit, credentials = named_step("submit")["env"], named_step("credentials")["env"]
    of_runs = set(re.findall(r"secrets\.(\w+)", " ".join(map(str, submit.values()))))
    of_clouds = set(re.findall(r"secrets\.(\w+)", " ".join(credentials.values())))
    assert of_runs | of_clouds == SECRETS
    assert of_runs & of_clouds == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    assert unread(named_step("credentials"), of_clouds) == set()


def test_sdks_of_every_cloud_that_may_be_chosen_are_installed() -> None:
    project = tomllib.loads((ROOT / "services/launcher/pyproject.toml").read_text())["project"]
    extras = [project["optional-dependencies"][name][0] for name in ("sky", "sky-clouds")]
    known = set(re.findall(r"[a-z]+", " ".join(extras)))
    assert set(request()["cloud"]["options"]) - {"any", "spec"} <= known
    assert "sky sky-clouds" in named_step("install")["run"]


def test_a_cancelled_job_cancels_its_run() -> None:
    (job,) = train()["jobs"].values()
    (cancel,) = [step for step in job["steps"] if step.get("id") == "cancel"]
    assert cancel["if"] == "cancelled()"
    assert "gha-${{ github.run_id }}" in job["env"]["REQUEST_ID"]


def test_reaping_is_scheduled_and_ci_runs_what_everybody_runs() -> None:
    assert read(ROOT / ".github/workflows/reap.yml")[True]["schedule"]
    ci = steps(ROOT / ".github/workflows/ci.yml")
    assert ci[-1]["run"] == ".ci/run"


def test_the_tinker_workflow_takes_what_the_reference_takes() -> None:
    inputs = request("train-tinker")
    assert train("train-tinker")["name"] == "Fleet Task Training (Tinker)"
    assert set(inputs) == TINKER_INPUTS
    assert all("default" in each for each in inputs.values())
    chosen = {name: each["default"] for name, each in inputs.items()}
    assert (chosen["max_steps"], chosen["batch_size"], chosen["n_samples_per_prompt"]) == (
        *("50", "8", "4"),
    )
    assert inputs["model_name"]["options"] == ["Qwen/Qwen3-8B", "Qwen/Qwen3-VL-30B-A3B-Instruct"]


def test_every_input_and_secret_of_the_tinker_workflow_reaches_its_script() -> None:
    submit = named_step("submit", "train-tinker")
    text = " ".join(map(str, submit["env"].values()))
    assert {name for name in TINKER_INPUTS if f"inputs.{name} " in text} == TINKER_INPUTS
    assert set(re.findall(r"secrets\.(\w+)", text)) == TINKER_SECRETS
    variables = {name for name, value in submit["env"].items() if "inputs." in value}
    assert unread(submit, variables | {"TINKER_BASE_URL", "SLACK_CHANNEL"}) == set()


def test_the_tinker_workflow_trains_one_run_at_a_time_and_ends_it_in_time() -> None:
    workflow = train("train-tinker")
    (job,) = workflow["jobs"].values()
    assert workflow["concurrency"] == {"group": "train-tinker"}
    assert named_step("cancel", "train-tinker")["if"] == "cancelled()"
    spec = tomllib.loads((ROOT / "deploy/runs/fleet-tinker.toml").read_text())
    assert 60 * spec["launcher"]["max_hours"] < job["timeout-minutes"]


@pytest.mark.parametrize("name", sorted(TINKER_INPUTS | TINKER_SECRETS))
def test_docs_name_every_input_and_secret_of_the_tinker_workflow(name: str) -> None:
    page = (ROOT / "docs/workflows.md").read_text()
    assert f"`{name}`" in page or f"`{name[:14]}*`" in page
