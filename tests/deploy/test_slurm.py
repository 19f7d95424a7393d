"""The batch script of deploy/slurm, with a double of `flotilla` in a repository of its own."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.repository import ROOT

SCRIPT = ROOT / "deploy/slurm/run.sbatch"
# Says what it was started with; told to drain it takes a moment, and ends as when interrupted.
DOUBLE = """#!/usr/bin/env bash
echo "$@" >> calls
trap 'echo draining >> calls; sleep 0.3; echo drained >> calls; exit 130' TERM
echo started > started
if [ "${HOLD:-}" ]; then for _ in $(seq 200); do sleep 0.05; done; fi
exit "${CODE:-0}"
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    flotilla = tmp_path / ".venv/bin/flotilla"
    flotilla.parent.mkdir(parents=True)
    flotilla.write_text(DOUBLE)
    flotilla.chmod(0o755)
    return tmp_path


def job(repository: Path, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
    slurm = {"SLURM_SUBMIT_DIR": str(repository), "SLURM_JOB_ID": "17"}
    return subprocess.Popen(
        ("bash", str(SCRIPT), *arguments), env={**os.environ, **slurm, **variables}, cwd="/"
    )


def calls(repository: Path) -> list[str]:
    return (repository / "calls").read_text().splitlines()


@pytest.mark.parametrize("code", [0, 1])
def test_a_job_trains_in_a_runs_folder_of_its_own_and_ends_as_the_run(
    repository: Path, code: int
) -> None:
    assert job(repository, "a.toml", "--seed=1", CODE=str(code)).wait(10) == code
    assert calls(repository) == ["train a.toml --runs runs/slurm-17 --seed=1"]


def test_a_job_that_begins_again_goes_on_with_its_run(repository: Path) -> None:
    journal = repository / "runs/slurm-17/a-1/journal.sqlite"
    journal.parent.mkdir(parents=True)
    journal.touch()
    job(repository, "a.toml").wait(10)
    job(repository, "a.toml", SLURM_JOB_ID="18").wait(10)
    job(repository, "a.toml", SLURM_JOB_ID="19", RUNS="runs/slurm-17").wait(10)
    assert calls(repository) == [
        "train a.toml --resume --runs runs/slurm-17",
        "train a.toml --runs runs/slurm-18",
        "train a.toml --resume --runs runs/slurm-17",
    ]


def test_a_job_that_slurm_begins_again_keeps_the_spec_of_its_run(repository: Path) -> None:
    run = repository / "runs/slurm-17/a-1"
    run.mkdir(parents=True)
    (run / "journal.sqlite").touch()
    (run / "spec.json").touch()
    job(repository, "a.toml", SLURM_RESTART_COUNT="1").wait(10)
    job(repository, "a.toml", SLURM_RESTART_COUNT="0").wait(10)
    assert calls(repository) == [
        "train runs/slurm-17/a-1/spec.json --resume --runs runs/slurm-17",
        "train a.toml --resume --runs runs/slurm-17",
    ]


def test_when_its_time_is_up_a_job_waits_until_the_run_has_drained(repository: Path) -> None:
    process = job(repository, "a.toml", HOLD="1")
    for _ in range(200):
        if (repository / "started").exists():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 130
    assert calls(repository)[1:] == ["draining", "drained"]


def test_without_a_spec_or_outside_of_slurm_it_says_what_is_missing(repository: Path) -> None:
    for arguments, slurm, said in (
        ((), repository, "name a run spec"),
        (("a.toml",), "", "sbatch"),
    ):
        done = subprocess.run(
            ("bash", str(SCRIPT), *arguments),
            env={**os.environ, "SLURM_SUBMIT_DIR": str(slurm)},
            check=False,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, said in done.stderr) == (1, True)
