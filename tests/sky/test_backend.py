"""SkyPilot, unmodified, starts replicas on a Slurm cluster's nodes and takes them away again."""

import asyncio
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flotilla_launcher.backends.ports import BackendError, LaunchSpec
from flotilla_launcher.backends.sky import names
from flotilla_launcher.backends.sky.backend import SkyBackend
from flotilla_launcher.backends.sky.sdk import SkyClient
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.doctor.adapters.clouds_probe import probe_sky
from flotilla_launcher.doctor.findings import Status
from flotilla_launcher.state import GATEWAY, LEARNER, ROLLOUT, ExitStatus, ReplicaKey
from tests.sky.box.layout import ROOT
from tests.sky.session import SkySession
from tests.support.run_specs import bare_spec

pytestmark = [
    pytest.mark.sky,
    pytest.mark.timeout(900),
    # SkyPilot uses deprecated parts of its own dependencies.
    pytest.mark.filterwarnings("ignore"),
]
_CPU = {"infra": "slurm/mini/cpu", "cpus": "1", "memory": "1"}
_GPU = {"infra": "slurm/mini/gpu", "cpus": "1", "memory": "1", "accelerators": "H100:1"}
_SECRETS = {"FLOTILLA_TOKEN": "canary-token", "FLOTILLA_TLS": "canary-tls"}


@pytest.fixture
def backend(sky_session: SkySession, tmp_path: Path) -> SkyBackend:
    return SkyBackend(tmp_path / "runs", ROOT, SkyClient(), poll_s=3.0)


def _config(**sky: Any) -> LauncherConfig:
    machines = {
        "learner": {"ordered": [_GPU]},
        "env_gateway": {"ordered": [_CPU]},
        "rollout": {"ordered": [_CPU]},
    }
    settings = {
        "setup": "echo set up",
        "python": "tests/sky/replica.sh",
        "commit": "HEAD",
        **machines,
        **sky,
    }
    whole = {"backend": "sky", "max_hours": 0.5, "sky": settings}
    return LauncherConfig.model_validate(whole)


def _launch(tmp_path: Path, run_id: str, key: ReplicaKey, config: LauncherConfig) -> LaunchSpec:
    log = tmp_path / f"{key[0]}-{key[1]}.log"
    spec = bare_spec({}, config)
    return LaunchSpec(run_id, key, (), _SECRETS, log, registry="10.88.0.1:4000", spec=spec)


def _allocations(box: SkySession) -> list[str]:
    """Return the running allocations from Slurm itself: the oracle."""
    listed = subprocess.run(
        ("squeue", "--noheader", "--format=%j"),
        env={"SLURM_CONF": str(box.layout.slurm_conf), "PATH": "/usr/bin:/bin"},
        check=True,
        capture_output=True,
        text=True,
    )
    return listed.stdout.split()


async def test_replicas_come_and_go_one_by_one_and_leave_nothing(
    sky_session: SkySession, backend: SkyBackend, tmp_path: Path
) -> None:
    run_id, config = "replicas-20260101-000000", _config()

    def launch(key: ReplicaKey) -> LaunchSpec:
        return _launch(tmp_path, run_id, key, config)

    keys = [(LEARNER, 0), (GATEWAY, 0), (ROLLOUT, 0)]
    learner, gateway, rollout = await asyncio.gather(
        *(backend.start_replica(launch(k)) for k in keys)
    )
    assert len(_allocations(sky_session)) == 3
    second = await backend.start_replica(launch((ROLLOUT, 1)))
    assert len(_allocations(sky_session)) == 4
    ended = asyncio.create_task(backend.wait_for_exit(second))
    await backend.kill_replica(second)
    assert await ended == ExitStatus(-9)
    successor = SkyBackend(tmp_path / "runs", ROOT, SkyClient(), poll_s=3.0)
    assert await successor.attach_replica(launch((LEARNER, 0)), learner)
    assert await successor.find_replica(launch((ROLLOUT, 0))) is not None
    assert await successor.find_replica(launch((ROLLOUT, 1))) is None
    assert {unit.name for unit in await successor.list_units([])} == {
        unit.name for unit in (learner, gateway, rollout)
    }
    assert await successor.reap_orphans([run_id]) == []
    await _cleaned(successor, run_id)
    assert await successor.wait_for_exit(rollout) == ExitStatus(
        1, "its machine is gone", preempted=True
    )
    await _until(lambda: not _allocations(sky_session))


async def test_a_cluster_per_replica_is_reaped_when_no_run_owns_it(
    sky_session: SkySession, backend: SkyBackend, tmp_path: Path
) -> None:
    run_id, config = "cluster-20260101-000000", _config()
    launch = _launch(tmp_path, run_id, (ROLLOUT, 0), config)
    unit = await backend.start_replica(launch)
    owned = names.parse_name(unit.name)
    assert owned is not None and owned.key == (ROLLOUT, 0)
    assert await backend.attach_replica(launch, unit)
    assert len(await backend.reap_orphans([])) == 1
    assert await backend.wait_for_exit(unit) == ExitStatus(1, "its machine is gone", preempted=True)
    await _until(lambda: not _allocations(sky_session))
    await _cleaned(backend, run_id)


async def test_a_machine_that_no_cloud_ever_has_is_a_wrong_wish(
    backend: SkyBackend, tmp_path: Path
) -> None:
    wish = {"ordered": [{**_GPU, "accelerators": "H100:2", "cpus": "64"}]}
    config = _config(rollout=wish)
    launch = _launch(tmp_path, "nothing-20260101-000000", (ROLLOUT, 0), config)
    with pytest.raises(BackendError, match="does not contain any instances") as caught:
        await backend.start_replica(launch)
    assert type(caught.value) is BackendError


def test_the_doctor_hears_from_skypilot_which_clouds_it_may_use(sky_session: SkySession) -> None:
    [slurm] = probe_sky({"wanted": {"learner": ["slurm/mini/gpu"], "rollout": ["lambda"]}})
    assert (slurm.status, slurm.detail) == (Status.OK, "enabled: lambda, slurm")
    [aws] = probe_sky({"wanted": {"learner": ["slurm/mini/gpu"], "rollout": ["aws"]}})
    assert aws.status is Status.FAIL
    assert "rollout: not enabled: aws" in aws.detail


async def _cleaned(backend: SkyBackend, run_id: str) -> None:
    """Clean up as the launcher does: again, until there is evidence."""
    evidence = await backend.clean_run(run_id)
    for _ in range(4):
        if not evidence.gone:
            evidence = await backend.clean_run(run_id)
    assert evidence.gone, evidence.detail


async def _until(condition: Callable[[], bool], limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(1.0)
