"""The batch script of deploy/slurm, with a double of `flotilla` in a repository of its own."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.repository import ROOT

SCRIPT = ROOT / "deploy/slurm/run.sbatch"
# Prints its arguments; on SIGTERM it drains for a moment, and ends as when interrupted.
DOUBLE = """#!/usr/bin/env bash
echo "$@" >> calls
trap 'echo draining >> calls; sleep 0.3; echo drained >> calls; exit 130' TERM
echo started > started
if [ "${HOLD:-}" ]; then for _ in $(seq 200); do sleep 0.05; done; fi
exit "${CODE:-0}"
"""


# Runs a step as Slurm would on another node, and prints which.
SRUN = """#!/usr/bin/env bash
case "$*" in *getent*) echo "10.0.0.5 STREAM node1"; exit ;; esac
echo "srun $*" | sed 's/ --kill-on.*flotilla/ flotilla/' >> steps
trap 'echo "ended $*" >> ended; exit 0' TERM
for _ in $(seq 1200); do [ -e dismissed ] && exit; sleep 0.05; done
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, text in ((".venv/bin/flotilla", DOUBLE), ("slurm/srun", SRUN)):
        program = tmp_path / name
        program.parent.mkdir(parents=True)
        program.write_text(text)
        program.chmod(0o755)
    return tmp_path


def job(repository: Path, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
    path = f"{repository}/slurm:{os.environ['PATH']}"
    slurm = {"SLURM_SUBMIT_DIR": str(repository), "SLURM_JOB_ID": "17", "PATH": path}
    return subprocess.Popen(
        ("bash", str(SCRIPT), *arguments), env={**os.environ, **slurm, **variables}, cwd="/"
    )


def calls(repository: Path) -> list[str]:
    return (repository / "calls").read_text().splitlines()


@pytest.mark.parametrize("code", [0, 1])
def test_a_job_trains_in_a_runs_folder_of_its_own_and_ends_as_the_run(
    repository: Path, code: int
) -> None:
    assert job(repository, "a.toml", "--seed=1", CODE=str(code)).wait(60) == code
    assert calls(repository) == ["train a.toml --runs runs/slurm-17 --seed=1"]


def test_a_job_that_begins_again_resumes_its_run(repository: Path) -> None:
    journal = repository / "runs/slurm-17/a-1/journal.sqlite"
    journal.parent.mkdir(parents=True)
    journal.touch()
    job(repository, "a.toml").wait(60)
    job(repository, "a.toml", SLURM_JOB_ID="18").wait(60)
    job(repository, "a.toml", SLURM_JOB_ID="19", RUNS="runs/slurm-17").wait(60)
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
    job(repository, "a.toml", SLURM_RESTART_COUNT="1").wait(60)
    job(repository, "a.toml", SLURM_RESTART_COUNT="0").wait(60)
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
    assert process.wait(60) == 130
    assert calls(repository)[1:] == ["draining", "drained"]


def test_without_a_spec_or_outside_of_slurm_it_names_what_is_missing(repository: Path) -> None:
    for arguments, slurm, message in (
        ((), repository, "pass a run spec"),
        (("a.toml",), "", "sbatch"),
    ):
        done = subprocess.run(
            ("bash", str(SCRIPT), *arguments),
            env={**os.environ, "SLURM_SUBMIT_DIR": str(slurm)},
            check=False,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, message in done.stderr) == (1, True)


SEVERAL = {"SLURM_JOB_NUM_NODES": "3", "SLURMD_NODENAME": "node1"}


def steps(repository: Path) -> list[str]:
    return sorted((repository / "steps").read_text().splitlines())


def test_further_nodes_join_the_run_of_the_first_one(repository: Path) -> None:
    (repository / "dismissed").touch()
    assert job(repository, "a.toml", "--seed=1", **SEVERAL).wait(60) == 0
    assert calls(repository) == [
        "train a.toml --runs runs/slurm-17 --launcher.local.network=private"
        " --learner.rank.nodes=3 --learner.rank.ray_port=20034 --seed=1"
    ]
    one = "srun --relative={0} --nodes=1 --ntasks=1 flotilla join 10.0.0.5 --service learner"
    assert steps(repository) == [
        f"{one.format(number)} --machine {number} --runs runs/slurm-17" for number in (1, 2)
    ]


def test_nodes_of_the_rollout_engine_come_after_those_of_the_learner(repository: Path) -> None:
    (repository / "dismissed").touch()
    assert job(repository, "a.toml", ROLLOUT_NODES="2", **SEVERAL).wait(60) == 0
    assert calls(repository) == [
        "train a.toml --runs runs/slurm-17 --launcher.local.network=private"
        " --learner.rank.nodes=2 --learner.rank.ray_port=20034"
        " --rollout.engine.nodes=2 --rollout.engine.ray_port=20035"
    ]
    learner, rollout = steps(repository)
    assert "--relative=1 " in learner and "--service learner --machine 1" in learner
    assert "--relative=2 " in rollout and "--service rollout --machine 1" in rollout


def test_more_rollout_nodes_than_a_job_has_are_refused(repository: Path) -> None:
    assert job(repository, "a.toml", ROLLOUT_NODES="4", **SEVERAL).wait(60) == 1
    assert not (repository / "calls").exists()


def test_further_nodes_stay_until_the_run_has_drained(repository: Path) -> None:
    process = job(repository, "a.toml", HOLD="1", **SEVERAL)
    for _ in range(200):
        if (repository / "started").exists():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    while "drained" not in calls(repository):
        time.sleep(0.01)
    assert not (repository / "ended").exists()
    (repository / "dismissed").touch()
    assert process.wait(60) == 130


@pytest.mark.slow
def test_further_nodes_that_no_run_dismisses_are_ended_with_the_job(repository: Path) -> None:
    assert job(repository, "a.toml", CODE="1", **SEVERAL).wait(60) == 1
    assert len((repository / "ended").read_text().splitlines()) == 2
