"""Runs on machines of an emulated cloud, through SkyPilot's unmodified provisioner of that cloud.

The cloud's own list is what costs money, whatever any other component believes.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla.launcher.v1 import run_service_pb2 as pb
from tests.sky.catalog import LAMBDA_MACHINES
from tests.sky.rented import CPU, gpu, launcher, service_process, spec
from tests.sky.sdk import until
from tests.sky.session import SkySession

pytestmark = [
    pytest.mark.sky,
    pytest.mark.timeout(5400),
    # SkyPilot uses deprecated parts of its own dependencies.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def as_it_was(sky_session: SkySession) -> Iterator[None]:
    yield
    assert sky_session.cloud.put_right() == []


def _machine_of(session: SkySession, service: str) -> dict[str, str]:
    """The machine that the cloud bills for a service."""
    [machine] = [m for m in session.cloud.machines() if f"-{service}-" in m["name"]]
    return machine


async def test_a_run_takes_its_next_candidate_and_a_lost_rollout_comes_back_beside_its_learner(
    sky_session: SkySession, tmp_path: Path
) -> None:
    cloud = sky_session.cloud
    cloud.set_capacity(0, "us-east-1")
    candidates = [gpu("us-east-1", "A10"), gpu("us-west-1")]
    regions = [{**CPU, "infra": f"lambda/{region}"} for region in ("us-south-1", "us-west-1")]
    machines = {"learner": {"ordered": candidates}, "rollout": {"ordered": regions}}
    wish = spec(sky_session, sky=machines)
    async with launcher(tmp_path / "runs") as rented:
        run_id = await rented.start(wish)
        await rented.running(run_id)
        # One request goes through all candidates.
        assert not any("found no machine" in text for text in rented.messages)
        assert not any("exited" in text for text in rented.messages)
        assert len(cloud.machines()) == 3
        learner = _machine_of(sky_session, "learner")
        assert learner["region"] == {"name": "us-west-1"}
        assert learner["instance_type"] == {"name": "gpu_1x_h100_pcie"}
        price = LAMBDA_MACHINES["gpu_1x_h100_pcie"][-1]
        await rented.notified(f"learner-0 costs ${price:.2f} an hour")

        process = service_process(run_id, "learner")
        before, lost = await rented.get(run_id), _machine_of(sky_session, "rollout")
        cloud.preempt(lost["id"])
        until("another machine", lambda: len(cloud.machines()) == 3)
        found = _machine_of(sky_session, "rollout")
        assert found["id"] != lost["id"]
        # The place of the lost machine would have been tried last.
        assert (lost["region"], found["region"]) == ({"name": "us-south-1"}, {"name": "us-west-1"})
        await rented.notified("rollout-0 has the machine", f"vm-{found['id'][:8]}")

        assert _machine_of(sky_session, "learner")["id"] == learner["id"]
        assert service_process(run_id, "learner") == process
        after = await rented.get(run_id)
        assert after.state == pb.RUN_STATE_RUNNING
        assert [r.restarts for r in after.replicas if r.service == "learner"] == [
            r.restarts for r in before.replicas if r.service == "learner"
        ]
        ended = await rented.stop(run_id)
        assert (ended.state, ended.cleanup) == (pb.RUN_STATE_STOPPED, pb.CLEANUP_VERIFIED)
        assert cloud.machines() == []


async def test_an_api_server_that_stops_while_machines_boot_ends_nothing_and_leaves_nothing(
    sky_session: SkySession, tmp_path: Path
) -> None:
    cloud, api = sky_session.cloud, sky_session.api
    cloud.set_boot_delay(40)
    async with launcher(tmp_path / "runs") as rented:
        run_id = await rented.start(spec(sky_session))
        await asyncio.to_thread(until, "a machine", lambda: bool(cloud.machines()))
        booting = {machine["id"] for machine in cloud.machines()}
        await asyncio.to_thread(api.stop)
        run = await rented.until(run_id, lambda run: bool(run.unreachable))
        assert "API server does not answer" in run.unreachable
        await asyncio.sleep(60.0)
        run = await rented.get(run_id)
        assert (run.state, run.cleanup) == (pb.RUN_STATE_PROVISIONING, pb.CLEANUP_PENDING)
        assert {replica.state for replica in run.replicas} == {"starting"}
        assert booting <= {machine["id"] for machine in cloud.machines()}

        await asyncio.to_thread(api.start)
        await rented.until(run_id, lambda run: not run.unreachable)
        ended = await rented.stop(run_id)
        assert (ended.state, ended.cleanup) == (pb.RUN_STATE_STOPPED, pb.CLEANUP_VERIFIED)
        assert cloud.machines() == []


async def test_a_cloud_that_is_away_when_a_run_is_stopped_is_waited_for_and_nothing_is_left(
    sky_session: SkySession, tmp_path: Path
) -> None:
    cloud = sky_session.cloud
    async with launcher(tmp_path / "runs") as rented:
        run_id = await rented.start(spec(sky_session))
        await rented.running(run_id)
        billed = {machine["id"] for machine in cloud.machines()}
        cloud.set_broken(True)
        stopping = asyncio.create_task(rented.stop(run_id))
        # Longer than it may drain.
        await asyncio.sleep(90.0)
        run = await rented.get(run_id)
        assert run.state in (pb.RUN_STATE_DRAINING, pb.RUN_STATE_TEARDOWN)
        assert run.cleanup in (pb.CLEANUP_PENDING, pb.CLEANUP_VERIFYING)
        assert not stopping.done()
        assert {machine["id"] for machine in cloud.machines()} == billed
        cloud.set_broken(False)
        ended = await stopping
        assert (ended.state, ended.outcome) == (pb.RUN_STATE_STOPPED, pb.OUTCOME_STOPPED)
        assert ended.cleanup == pb.CLEANUP_VERIFIED
        assert cloud.machines() == []
