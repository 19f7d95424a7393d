"""Drains on a backend that is slow to report its starts and ends."""

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from flotilla.launcher.v1 import registry_service_pb2 as registry_pb
from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_common.rpc import rpc
from flotilla_launcher.backends.ports import BackendUnreachable, LaunchSpec, ResourceOffer
from flotilla_launcher.state import Unit
from tests.support.fake_backend import FakeBackend
from tests.support.launcher import ServedLauncher, serving, spec


class SlowBackend(FakeBackend):
    """Reports the start of a replica long after it."""

    def __init__(self) -> None:
        super().__init__()
        self.proceed = asyncio.Event()

    async def start_replica(self, launch: LaunchSpec) -> Unit:
        unit = await super().start_replica(launch)
        await self.proceed.wait()
        return unit


async def registered(served: ServedLauncher, run_id: str) -> None:
    """Make all replicas report that they serve."""
    run = await served.get(run_id)
    for replica in run.replicas:
        sender: dict[str, Any] = {
            "run_id": run_id,
            "service": replica.service,
            "replica": replica.replica,
        }
        request = registry_pb.RegisterRequest(
            **sender, incarnation=replica.service, address="127.0.0.1:1"
        )
        await served.registry.Register(request)
        await served.registry.Heartbeat(
            registry_pb.HeartbeatRequest(**sender, incarnation=replica.service, serving=True)
        )


async def reports(
    served: ServedLauncher, run_id: str, service: str
) -> "registry_pb.Command.ValueType":
    """The command that a replica gets in answer to its heartbeat."""
    answer = await served.registry.Heartbeat(
        registry_pb.HeartbeatRequest(
            run_id=run_id, service=service, replica=0, incarnation=service, serving=True
        )
    )
    return answer.command


async def left(served: ServedLauncher, run_id: str, service: str) -> None:
    """Send the final report of a replica's watcher."""
    await served.registry.ReportUnit(
        registry_pb.ReportUnitRequest(
            run_id=run_id,
            service=service,
            replica=0,
            incarnation=f"watcher of {service}",
            phase=registry_pb.UNIT_PHASE_EXITED,
        )
    )


async def with_one_to_kill(served: ServedLauncher, backend: FakeBackend) -> str:
    """A run with an excess rollout that does not drain; returns its id."""
    backend.stubborn = True
    run_id = await served.start(spec(launcher={"rollout": {"replicas": 2}, "drain_s": 0.2}))
    await served.until(run_id, lambda run: len(backend.list_running("rollout")) == 2)
    request = pb.ScaleServiceRequest(run_id=run_id, service="rollout", replicas=1)
    await served.runs.ScaleService(request)
    return run_id


@pytest.mark.parametrize("late", [False, True])
async def test_a_kill_without_an_answer_does_not_mark_a_backend_that_answers_since(
    tmp_path: Path, late: bool
) -> None:
    class UnreachableAfterKill(FakeBackend):
        async def kill_replica(self, unit: Unit) -> None:
            self.finish_unit(unit)
            await asyncio.sleep(0.2 * late)
            self.killed.append(unit)
            raise BackendUnreachable("no answer")

    backend = UnreachableAfterKill()
    async with serving(tmp_path, backend) as served:
        run_id = await with_one_to_kill(served, backend)
        stopped = {"starting", "stopped"}
        run = await served.until(
            run_id,
            lambda run: len(backend.killed) > 0 and {r.state for r in run.replicas} == stopped,
        )
        assert run.unreachable == ""


@pytest.mark.slow
async def test_a_backend_gets_one_kill_at_a_time_and_less_and_less_often(
    tmp_path: Path,
) -> None:
    class Slow(FakeBackend):
        async def kill_replica(self, unit: Unit) -> None:
            began.append(time.monotonic())
            await asyncio.sleep(2.5)
            ended.append(time.monotonic())
            if len(ended) >= 3:
                self.finish_unit(unit)

    began: list[float] = []
    ended: list[float] = []
    backend = Slow()
    async with serving(tmp_path, backend) as served:
        run_id = await with_one_to_kill(served, backend)
        await served.until(run_id, lambda run: len(ended) == 3)
        waits = [after - before for before, after in zip(ended, began[1:], strict=False)]
        assert waits[0] >= 0.9 and waits[1] >= 1.9


async def test_what_serves_is_drained_though_its_backend_has_not_reported_its_start(
    tmp_path: Path,
) -> None:
    backend = SlowBackend()
    async with serving(tmp_path, backend) as served:
        run_id = await served.start(spec())
        await served.until(run_id, lambda run: len(backend.launches) == 3)
        await registered(served, run_id)
        request = pb.StopRunRequest(run_id=run_id, grace=rpc.to_duration(60.0))
        stopping = asyncio.ensure_future(served.runs.StopRun(request))
        await served.until(run_id, lambda run: run.state == pb.RUN_STATE_DRAINING)
        assert await reports(served, run_id, "rollout") == registry_pb.COMMAND_DRAIN
        assert await reports(served, run_id, "learner") == registry_pb.COMMAND_NONE
        assert backend.killed == []
        await left(served, run_id, "rollout")
        for service in ("learner", "env_gateway"):
            assert await reports(served, run_id, service) == registry_pb.COMMAND_DRAIN
            await left(served, run_id, service)
        assert backend.killed == []
        backend.proceed.set()
        await served.until(run_id, lambda run: all(r.pid for r in run.replicas))
        for service in ("rollout", "learner", "env_gateway"):
            for unit in backend.list_running(service):
                backend.finish_unit(unit)
        await stopping
        run = await served.get(run_id)
    assert run.state == pb.RUN_STATE_STOPPED


async def test_a_replica_that_was_scaled_away_and_serves_again_is_stopped(
    tmp_path: Path,
) -> None:
    """SkyPilot gives a machine again to a replica that its group declares."""
    backend = FakeBackend()
    async with serving(tmp_path, backend) as served:
        run_id = await served.start(spec(launcher={"rollout": {"replicas": 2}}))
        await served.until(run_id, lambda run: len(backend.launches) == 4)
        request = pb.ScaleServiceRequest(run_id=run_id, service="rollout", replicas=1)
        await served.runs.ScaleService(request)
        await served.until(run_id, lambda run: _state(run, 1) == "stopped")
        sender: dict[str, Any] = {"run_id": run_id, "service": "rollout", "replica": 1}
        await served.registry.Register(
            registry_pb.RegisterRequest(**sender, incarnation="again", address="127.0.0.1:1")
        )
        beat = registry_pb.HeartbeatRequest(**sender, incarnation="again", serving=True)
        answer = await served.registry.Heartbeat(beat)
        assert answer.command == registry_pb.COMMAND_STOP


def _state(run: pb.Run, rollout: int) -> str:
    found = (r for r in run.replicas if (r.service, r.replica) == ("rollout", rollout))
    return next(found, pb.ServiceReplica()).state


class HesitantBackend(FakeBackend):
    """Takes long to state the machines of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.queried, self.proceed = asyncio.Event(), asyncio.Event()
        self.offers = 0

    async def offer_resources(self, launch: LaunchSpec) -> ResourceOffer:
        self.offers += 1
        self.queried.set()
        await self.proceed.wait()
        return await super().offer_resources(launch)


async def test_a_run_that_was_being_begun_when_its_launcher_had_to_go_is_not_begun(
    tmp_path: Path,
) -> None:
    backend = HesitantBackend()
    async with serving(tmp_path, backend) as served:
        beginning = asyncio.ensure_future(served.start(spec()))
        await backend.queried.wait()
        closing = asyncio.create_task(served.launcher.close(0.0))
        await asyncio.sleep(0)
        backend.proceed.set()
        with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
            await beginning
        await closing
        assert backend.launches == []
        assert served.launcher.store.list_newest() == []


class DeafBackend(FakeBackend):
    """Claims to have ended a replica that still runs."""

    async def drain_replica(self, unit: Unit) -> None:
        self.drained.append(unit)

    async def kill_replica(self, unit: Unit) -> None:
        self.killed.append(unit)


@pytest.mark.parametrize(
    ("remains", "cleanup"),
    [("", pb.CLEANUP_VERIFIED), ("machine i-1 still runs", pb.CLEANUP_LEAK_SUSPECTED)],
)
async def test_a_run_whose_machines_never_end_does_not_drain_for_ever(
    tmp_path: Path, remains: str, cleanup: "pb.Cleanup.ValueType"
) -> None:
    backend = DeafBackend()
    backend.remains = remains
    async with serving(tmp_path, backend) as served:
        run_id = await served.start(spec(launcher={"clean_s": 0.5}))
        await served.until(run_id, lambda run: len(backend.launches) == 3)
        await registered(served, run_id)
        request = pb.StopRunRequest(run_id=run_id, grace=rpc.to_duration(0.5))
        await served.runs.StopRun(request)
        run = await served.get(run_id)
    assert (run.state, run.cleanup, run.cleanup_detail) == (
        *(pb.RUN_STATE_STOPPED, cleanup, remains),
    )
    assert {replica.state for replica in run.replicas} == {"draining"}
    assert len(backend.killed) >= 3
