"""Unmodified SkyPilot on the box: a cluster, a Job Group, and a member that joins it."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.sky.sdk import launch, logs, queue, until
from tests.sky.session import SkySession

pytestmark = [pytest.mark.sky, pytest.mark.timeout(600)]

SECRET = "canary-5f1d0c"
GROUP = """
name: pair
execution: parallel
primary_tasks: [learner]
termination_delay: {default: 2s}
inter_connection: false
---
name: learner
resources: {infra: slurm/mini/gpu, cpus: 4, memory: 1, accelerators: H100:1}
run: sleep 1000
---
name: gateway
resources: {infra: slurm/mini/cpu, cpus: 4, memory: 1}
run: sleep 1000
"""


def resources(infra: str, **more: Any) -> Any:
    return import_module("sky").Resources(infra=infra, cpus=1, memory=1, **more)


def test_a_cluster_gets_the_workdir_and_the_secrets_and_leaves(
    sky_session: SkySession, tmp_path: Path
) -> None:
    sky = import_module("sky")
    (tmp_path / "carried.txt").write_text("carried along")
    task = sky.Task(
        name="hello",
        workdir=str(tmp_path),
        setup="echo set up on $(hostname)",
        run='cat carried.txt; echo; echo "$(hostname) has ${#TOKEN} characters"',
        secrets={"TOKEN": SECRET},
    )
    task.set_resources(resources("slurm/mini/gpu", accelerators="H100:2"))
    job, handle = launch(task, "hello")
    shown = logs("hello", job)
    [address] = handle.internal_ips()
    node = next(
        node for node in sky_session.layout.nodes if sky_session.layout.address(node) == address
    )
    assert "carried along" in shown
    assert f"{node} has {len(SECRET)} characters" in shown
    assert SECRET not in shown
    assert len(sky_session.box.jobs()) == 1
    sky.get(sky.down("hello"))
    sky_session.box.until("the job's end", lambda: not sky_session.box.jobs())
    assert sky.get(sky.status()) == []


def test_a_member_joins_a_job_group_and_leaves_without_disturbing_it(
    sky_session: SkySession,
) -> None:
    sky = import_module("sky")
    jobs = import_module("sky.jobs")
    group = import_module("sky.utils.dag_utils").load_job_group_from_yaml_str(GROUP)
    [number], _ = sky.get(jobs.launch(group))
    until("the group", lambda: [state for state, _ in queue(number)] == ["RUNNING", "RUNNING"])
    task = sky.Task(name="rollout-0", run="echo member of $SKYPILOT_ROOT_JOB_ID; sleep 1000")
    task.set_resources(resources("slurm/mini/gpu", accelerators="H100:2"))
    [member], _ = sky.get(jobs.launch(task, job_group=number))
    until("the member", lambda: queue(member) == [("RUNNING", number)])
    assert len(sky_session.box.jobs()) == 3
    sky.get(jobs.cancel(job_ids=[member]))
    until("the member's end", lambda: queue(member) == [("CANCELLED", number)])
    assert [state for state, _ in queue(number)] == ["RUNNING", "RUNNING"]
    until("its cluster's end", lambda: len(sky_session.box.jobs()) == 2)
    sky.get(jobs.cancel(job_ids=[number]))
    until("the end", lambda: not sky_session.box.jobs())
