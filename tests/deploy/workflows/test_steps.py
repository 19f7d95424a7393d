"""The steps of the training workflow, unchanged, against a real launcher."""

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from flotilla_common.spec.spec_loading import load_spec
from flotilla_launcher.run_spec import read_spec
from flotilla_launcher.security import launcher_address
from flotilla_launcher.state import RunState
from flotilla_launcher.store.ledger import Ledger, StoredRun
from flotilla_learner.config.tracking import TrackingConfig
from flotilla_learner.sampling.tasks import load_tasks
from tests.reading.data.made_tasks import make_row
from tests.support.launcher import forged_command, forged_fakes, left_running, spec
from tests.support.repository import ROOT
from tests.support.waiting import until

REQUEST = "gha-1-1"
# An empty form, except for the spec and its machine.
FORM = {
    "TASK_NAME": "fake",
    "MODALITY": "all",
    "ENV_KEY": "",
    "ENV_KEYS": "",
    "DIFFICULTY": "all",
    "MAX_TASKS": "",
    "CLOUD": "spec",
    "DATA_VERSION": "",
    "RESUME_RUN_NAME": "",
    "MAX_COST": "",
    "DISABLE_SLACK": "false",
}


def step(name: str) -> str:
    workflow = yaml.safe_load((ROOT / ".github/workflows/train-skypilot.yml").read_text())
    (job,) = workflow["jobs"].values()
    (found,) = [each["run"] for each in job["steps"] if each.get("id") == name]
    return found


def checkout(folder: Path, *, steps: int = 2, flotilla: str = "") -> Path:
    """Make the job's checkout of the repository, with a spec of fakes."""
    for part in (".ci", "deploy/runs", ".venv-sky/bin"):
        (folder / part).mkdir(parents=True)
    shutil.copy(ROOT / ".ci/submit", folder / ".ci/submit")
    source = folder.parent / "tasks.json"
    fields = {"task_modality": "computer_use", "difficulty": 3}
    rows = [make_row(f"{env}-{n}", env, **fields) for env in ("shop", "booking") for n in range(30)]
    source.write_text(json.dumps([*rows, make_row("easy", "tracker")]))
    wish = spec(learner={"steps": steps, "step_s": 0.1}, data={"source": str(source)})
    wish["launcher"]["modules"]["learner"] = "tests.deploy.workflows.task_reading_learner"
    (folder / "deploy/runs/fake.toml").write_text(_toml(wish))
    real = f'exec {shlex.join(forged_command("-m", "flotilla_launcher.cli.app"))} "$@"'
    program = folder / ".venv-sky/bin/flotilla"
    program.write_text(f"#!/bin/sh\n{flotilla or real}\n")
    program.chmod(0o755)
    return folder


def _toml(table: Mapping[str, Any], prefix: str = "") -> str:
    """Enough of TOML for a spec of fakes."""
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, dict):
            lines += [f"[{prefix}{key}]", _toml(value, f"{prefix}{key}.")]
    return "\n".join(lines)


def test_nothing_that_a_run_prints_is_a_command_to_github(tmp_path: Path) -> None:
    folder = checkout(tmp_path / "repository", flotilla="echo ::add-mask::0")
    words: set[str] = set()
    for _ in range(2):
        done = subprocess.run(
            (folder / ".ci/submit",),
            env={**os.environ, **FORM, "REQUEST_ID": REQUEST, "GITHUB_ACTIONS": "true"},
            capture_output=True,
            text=True,
            check=True,
        )
        stopped, printed = done.stdout.splitlines()
        assert printed == "::add-mask::0"
        assert re.fullmatch("::stop-commands::[0-9a-f]{32}", stopped)
        words.add(stopped)
    assert len(words) == 2, "a guessed word would let GitHub listen again"


@asynccontextmanager
async def launcher(runs: Path) -> AsyncGenerator[str]:
    """A separate launcher; yields the secret that a repository keeps of it."""
    await asyncio.to_thread(runs.mkdir)
    process = await asyncio.create_subprocess_exec(
        *forged_command("-m", "flotilla_launcher", "--runs", str(runs)),
        cwd=ROOT,
        env={**os.environ, **forged_fakes()},
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield await asyncio.to_thread(_secret_of, runs)
    finally:
        process.terminate()
        await process.wait()


def _secret_of(runs: Path) -> str:
    while launcher_address.read_address(runs) is None:
        time.sleep(0.05)
    return (runs / "launcher.json").read_text()


async def start(name: str, folder: Path, secret: str, **form: str) -> asyncio.subprocess.Process:
    """Run a step as GitHub does: `bash -e`, with the inputs in the environment."""
    surroundings = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{ROOT}:{ROOT / 'gen'}",
        "FLOTILLA_LAUNCHER": secret,
        "REQUEST_ID": REQUEST,
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
    }
    return await asyncio.create_subprocess_exec(
        *("bash", "-e", "-c", step(name)),
        cwd=folder,
        env={**surroundings, **FORM, **form},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )


async def run_step(name: str, folder: Path, secret: str, **form: str) -> tuple[int | None, str]:
    process = await start(name, folder, secret, **form)
    output, _ = await process.communicate()
    return process.returncode, output.decode()


def stored_runs(runs: Path) -> list[StoredRun]:
    store = Ledger(runs / "launcher.sqlite")
    found = store.list_newest()
    store.close()
    return found


def remove_data(stored: StoredRun) -> None:
    """Remove what a launcher prepared for a run in its working folder, the repository."""
    (made,) = json.loads(stored.spec_json)["prepare"]
    shutil.rmtree(ROOT / made["creates"])


async def test_a_run_is_submitted_with_all_inputs_and_followed(tmp_path: Path) -> None:
    folder, runs = checkout(tmp_path / "job"), tmp_path / "runs"
    form = {
        "MODALITY": "computer_use",
        "ENV_KEY": "shop",
        "ENV_KEYS": "booking, tracker",
        "DIFFICULTY": "2,3",
        "MAX_TASKS": "50",
        "MAX_COST": "25.5",
        "DISABLE_SLACK": "true",
    }
    async with launcher(runs) as secret:
        code, output = await run_step("submit", folder, secret, **form)
        assert code == 0, output
        assert "run completed" in output
        again, output = await run_step("submit", folder, secret, **form)
        assert again == 0, output
    (stored,) = stored_runs(runs)
    reported = json.loads(stored.spec_json)
    (made,) = reported["prepare"]
    assert made["command"][3:] == [
        *("--out", made["creates"], "--modality=computer_use", "--env=shop,booking,tracker"),
        *("--difficulty=2,3", "--max-tasks=50", "--", str(tmp_path / "tasks.json")),
    ]
    assert len(load_tasks(ROOT / reported["learner"]["tasks"])) == 50
    remove_data(stored)
    assert reported["launcher"]["max_cost"] == 25.5
    assert reported["launcher"]["notify"]["disable_slack"] is True
    assert stored.run.run_id in (folder / "summary.md").read_text()
    assert json.loads(secret)["token"] not in output


async def test_cancelling_the_job_cancels_the_run(tmp_path: Path) -> None:
    folder, runs = checkout(tmp_path / "job", steps=10_000), tmp_path / "runs"
    async with launcher(runs) as secret:
        process = await start("submit", folder, secret)
        assert process.stdout is not None
        async for line in process.stdout:
            if b"run running" in line:
                break
        # A runner does this to processes that have not ended some seconds after the request.
        os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()
        code, output = await run_step("cancel", folder, secret)
        assert code == 0, output
        assert "stopped, machines: verified" in output
        (stored,) = stored_runs(runs)
        assert stored.run.state is RunState.STOPPED
        again, _ = await run_step("cancel", folder, secret)
        assert again == 0
    remove_data(stored)


# The launcher ends after 30 s without a request.
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_cancelling_a_job_that_started_its_own_launcher_leaves_no_process(
    tmp_path: Path, number: signal.Signals
) -> None:
    folder, home = checkout(tmp_path / "job", steps=10_000), tmp_path / "home"
    await asyncio.to_thread(home.mkdir)
    runs = home / "flotilla-runs"
    process = await start("submit", folder, "", HOME=str(home))
    assert process.stdout is not None
    async for line in process.stdout:
        if b"run running" in line:
            break
    assert left_running(runs)
    os.killpg(process.pid, number)
    await asyncio.sleep(0.2)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.communicate()
    code, output = await run_step("cancel", folder, "", HOME=str(home))
    assert code == 0, output
    assert "stopped, machines: verified" in output
    (stored,) = stored_runs(runs)
    assert stored.run.state is RunState.STOPPED
    # The launcher ends alone after a while without requests.
    await until(lambda: not left_running(runs))


async def test_what_was_cancelled_before_it_began_never_begins(tmp_path: Path) -> None:
    folder, runs = checkout(tmp_path / "job"), tmp_path / "runs"
    async with launcher(runs) as secret:
        code, output = await run_step("cancel", folder, secret)
        assert code == 0, output
        assert "never will" in output
        code, output = await run_step("submit", folder, secret)
        assert code == 1
        assert "was cancelled before it began a run" in output
    assert stored_runs(runs) == []


async def arguments_of(tmp_path: Path, **form: str) -> list[str]:
    folder = checkout(tmp_path / "job", flotilla='printf "%s\\n" "$@"')
    code, output = await run_step("submit", folder, "", **form)
    assert code == 0, output
    return output.splitlines()


async def test_clouds_and_the_run_to_resume_are_chosen_by_name(tmp_path: Path) -> None:
    remote = "s3://bucket/all-runs"
    arguments = await arguments_of(
        tmp_path, CLOUD="lambda", RESUME_RUN_NAME="demo-1", CHECKPOINT_REMOTE=remote
    )
    assert f"--learner.checkpoint.remote={remote}" in arguments
    assert arguments[:3] == ["submit", "deploy/runs/fake.toml", "--request-id"]
    assert arguments[arguments.index("--resume") + 1] == "demo-1"
    overrides = [each for each in arguments if each.startswith("--launcher.")]
    text = await asyncio.to_thread(load_spec, tmp_path / "job/deploy/runs/fake.toml", overrides)
    config = read_spec(text).config
    assert (config.backend, config.sky.cloud) == ("sky", "lambda")


# A value of each input that differs from the empty form.
TYPED = {
    "TASK_NAME": "fake-2",
    "MODALITY": "computer_use",
    "ENV_KEY": "shop",
    "ENV_KEYS": "shop,booking",
    "DIFFICULTY": "2",
    "MAX_TASKS": "9",
    "CLOUD": "lambda",
    "DATA_VERSION": "v0.0.14",
    "RESUME_RUN_NAME": "demo-1",
    "MAX_COST": "5",
    "DISABLE_SLACK": "true",
    "WANDB_API_KEY": "k",
}


async def test_every_input_changes_what_is_submitted(tmp_path: Path) -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/train-skypilot.yml").read_text())
    (job,) = workflow["jobs"].values()
    (given,) = [each["env"] for each in job["steps"] if each.get("id") == "submit"]
    assert {name for name, value in given.items() if "inputs." in value} == set(TYPED)
    empty = await arguments_of(tmp_path / "empty")
    for name, value in TYPED.items():
        assert await arguments_of(tmp_path / name, **{name: value}) != empty, name


async def test_messages_link_to_the_page_of_the_job(tmp_path: Path) -> None:
    job = {"GITHUB_SERVER_URL": "https://git.example", "GITHUB_REPOSITORY": "team/code"}
    arguments = await arguments_of(tmp_path, **job, GITHUB_RUN_ID="7")
    overrides = [each for each in arguments if each.startswith("--launcher.")]
    text = await asyncio.to_thread(load_spec, tmp_path / "job/deploy/runs/fake.toml", overrides)
    link = read_spec(text).config.notify.link
    assert link == "https://git.example/team/code/actions/runs/7"


@pytest.mark.parametrize("disabled", ["true", "false"])
async def test_people_are_notified_where_the_repository_sets(tmp_path: Path, disabled: str) -> None:
    given = {"SLACK_CHANNEL": "#fleet-runs", "WANDB_API_KEY": "key-of-wandb"}
    arguments = await arguments_of(tmp_path, DISABLE_SLACK=disabled, **given)
    assert "key-of-wandb" not in " ".join(arguments)
    overrides = [each for each in arguments if re.match(r"--(launcher|learner)\.", each)]
    text = await asyncio.to_thread(load_spec, tmp_path / "job/deploy/runs/fake.toml", overrides)
    reported = TrackingConfig.model_validate(text["learner"]["tracking"])
    assert reported.backends == ("jsonl", "console", "wandb")
    notify = read_spec(text).config.notify
    assert (notify.slack.channel, notify.disable_slack) == ("#fleet-runs", disabled == "true")


async def test_without_a_channel_and_a_key_nothing_is_sent(tmp_path: Path) -> None:
    arguments = await arguments_of(tmp_path)
    assert not [each for each in arguments if "slack" in each or "tracking" in each]


async def test_what_is_typed_into_a_form_is_never_run(tmp_path: Path) -> None:
    evil = "$(touch pwned)`touch pwned`\"; touch pwned; '"
    arguments = await arguments_of(tmp_path, ENV_KEYS=evil, MAX_TASKS=evil, RESUME_RUN_NAME=evil)
    assert f"--data.max_tasks={evil}" in arguments
    assert not (tmp_path / "job/pwned").exists()


async def test_a_version_is_that_of_the_dataset_of_the_repository(tmp_path: Path) -> None:
    form = {"DATA_SOURCE": "s3://bucket"}
    arguments = await arguments_of(tmp_path, DATA_VERSION="0.3", **form)
    assert {'--data.source="s3://bucket"', '--data.version="0.3"'} <= set(arguments)
    (tmp_path / "other").mkdir()
    arguments = await arguments_of(tmp_path / "other", **form)
    assert not [each for each in arguments if "data.source" in each or "data.version" in each]


async def test_a_spec_outside_its_folder_is_refused(tmp_path: Path) -> None:
    folder = checkout(tmp_path / "job")
    code, output = await run_step("submit", folder, "", TASK_NAME="../../etc/passwd")
    assert code == 2
    assert "task_name" in output
