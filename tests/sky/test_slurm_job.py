"""`deploy/slurm/run.sbatch` on several nodes of a real Slurm cluster, without SkyPilot."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sky.box import Box
from tests.sky.slurm_job import NODES, SlurmJob, make_materials, spec

pytestmark = [pytest.mark.sky, pytest.mark.timeout(900)]

RANKS = "flotilla_learner.ranks"
ENGINE = "flotilla_rollout.nodes"
# vLLM starts on two nodes that have the same two cores.
ENGINE_S = 600.0
TWO = "--nodes=2"


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    with Box(NODES) as box:
        yield box


@pytest.fixture(scope="module")
def made(box: Box) -> Iterator[Path]:
    folder = box.layout.shared / "made"
    shutil.rmtree(folder, ignore_errors=True)
    yield make_materials(folder)
    shutil.rmtree(folder)


@pytest.fixture
def folder(box: Box, request: pytest.FixtureRequest) -> Iterator[Path]:
    folder = box.layout.shared / request.node.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def check_gone(box: Box, job: SlurmJob) -> None:
    job.until(lambda: not box.jobs() and not job.working())
    assert not list((job.runs / ".identity").glob("[!._]*"))


def test_a_job_on_two_nodes_trains_on_both_and_leaves_nothing(
    box: Box, made: Path, folder: Path
) -> None:
    job = SlurmJob(box, made, folder, spec(made, steps=6))
    job.submit(TWO)
    job.until(lambda: job.steps() > 0)
    first = job.first_node()
    [second] = [node for node, services in job.working().items() if RANKS in services]
    assert first != second
    assert {"flotilla_learner", "flotilla_env_gateway"} <= {*job.working()[first]}
    assert "flotilla_learner" not in job.working()[second]
    token = (job.runs / ".identity" / job.run_dir.name / "token").read_text()
    assert token not in job.command_lines()
    job.until(lambda: job.state() in ("COMPLETED", "FAILED"))
    assert (job.state(), job.exit_code()) == ("COMPLETED", "0:0"), job.explained()
    assert job.steps() == 6
    assert '"event": "the service ended"' in (job.run_dir / "logs/learner-node-1.log").read_text()
    check_gone(box, job)


def test_an_engine_may_span_nodes_of_a_job(box: Box, made: Path, folder: Path) -> None:
    wish = spec(made, steps=2)
    del wish["launcher"]["modules"]
    wish["rollout"]["engine"] = {"device": "cpu", "tensor_parallel": 2, "max_num_seqs": 16}
    job = SlurmJob(box, made, folder, wish)
    job.submit(TWO, ROLLOUT_NODES="2")
    job.until(lambda: job.steps() > 0, ENGINE_S)
    [second] = [node for node, services in job.working().items() if ENGINE in services]
    assert second != job.first_node()
    job.until(lambda: job.state() in ("COMPLETED", "FAILED"))
    assert job.state() == "COMPLETED", job.explained()
    logs = job.run_dir / "logs"
    assert '"event": "the service ended"' in (logs / "rollout-0-node-1.log").read_text()
    # One worker on each.
    assert (logs / "rollout-0-node-0-worker-0.log").exists()
    further = job.runs / f"{job.run_dir.name}.nodes" / "rollout-1"
    assert (further / "logs/rollout-0-node-1-worker-0.log").exists()
    check_gone(box, job)


def test_a_job_of_several_nodes_drains_when_its_time_is_up(
    box: Box, made: Path, folder: Path
) -> None:
    job = SlurmJob(box, made, folder, spec(made, steps=10_000))
    job.submit(TWO)
    job.until(lambda: job.steps() > 0)
    # What Slurm sends two minutes before the limit.
    box.slurm("scancel", "--batch", "--signal=TERM", job.job_id)
    job.until(lambda: job.state() in ("COMPLETED", "FAILED"))
    # As Ctrl-C.
    assert job.exit_code() == "130:0", job.explained()
    done = job.steps()
    check_gone(box, job)
    log = (job.run_dir / "logs/learner-0.log").read_text()
    assert '"event": "the service ended"' in log
    # No commit is lost, and the number of nodes may be another.
    job.submit("--nodes=3", overrides=(f"--learner.steps={done + 2}",))
    job.until(lambda: job.state() in ("COMPLETED", "FAILED"))
    assert job.state() == "COMPLETED", job.explained()
    assert job.steps() == done + 2
    assert (job.run_dir / "logs/learner-node-2.log").exists()
    check_gone(box, job)


def test_a_job_whose_node_dies_begins_again_and_resumes(box: Box, made: Path, folder: Path) -> None:
    job = SlurmJob(box, made, folder, spec(made, steps=10, checkpoint={"every": 1}))
    job.submit(TWO)
    job.until(lambda: job.steps() > 1)
    [second] = [node for node, services in job.working().items() if RANKS in services]
    box.kill_node(second)
    job.until(lambda: job.state() == "PENDING")
    # Slurm waits two minutes before a job begins again.
    box.slurm("scontrol", "update", f"jobid={job.job_id}", "StartTime=now")
    job.until(lambda: job.state() in ("COMPLETED", "FAILED"))
    assert job.state() == "COMPLETED", job.explained()
    assert job.steps() == 10
    box.revive_node(second)
    check_gone(box, job)
