"""Unmodified SkyPilot on the box: a cluster that gets its work and leaves."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.sky.sdk import launch, logs
from tests.sky.session import SkySession

pytestmark = [pytest.mark.sky, pytest.mark.timeout(600)]

SECRET = "canary-5f1d0c"


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
