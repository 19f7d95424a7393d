"""Runs that wait for devices: what counts from their start, and which claim they make."""

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_launcher.backends.ports import BackendError, DeviceClaim, QueuePlace
from flotilla_launcher.config.launcher import LauncherConfig, parse_launcher
from flotilla_launcher.control.budget import meter_cost
from flotilla_launcher.control.device_claims import make_claim
from flotilla_launcher.ports import LauncherHooks
from flotilla_launcher.state import (
    GATEWAY,
    LEARNER,
    ROLLOUT,
    Replica,
    ReplicaState,
    Run,
    RunState,
    Unit,
)
from flotilla_launcher.store.ledger import Ledger
from tests.support.fake_backend import FakeBackend
from tests.support.launcher import serving, spec

CONFIG = parse_launcher({"launcher": {"rollout": {"gpus": 2}, "learner": {"gpus": 1}}})
WANTED = {GATEWAY: 1, LEARNER: 1, ROLLOUT: 2}


@pytest.mark.parametrize(
    ("states", "count"),
    [
        ((), 5),
        ((ReplicaState.RUNNING, ReplicaState.RESTARTING), 5),
        # One that is given up keeps its devices; one that drains has them still.
        ((ReplicaState.FAILED, ReplicaState.STARTING), 5),
        ((ReplicaState.DRAINING, ReplicaState.RUNNING), 7),
        ((ReplicaState.STOPPED, ReplicaState.RUNNING), 5),
        ((ReplicaState.RUNNING, ReplicaState.RUNNING, ReplicaState.RUNNING), 7),
    ],
)
def test_a_run_claims_the_devices_of_all_replicas_that_have_or_need_them(
    states: tuple[ReplicaState, ...], count: int
) -> None:
    replicas = [Replica(ROLLOUT, index, state) for index, state in enumerate(states)]
    run = replace(Run("r", "demo", WANTED), priority=3).with_replicas(replicas)
    assert make_claim(run, CONFIG, 7.0) == DeviceClaim("r", count, 3, 7.0, waits=True)
    assert make_claim(run, LauncherConfig(), 7.0).count == 0


class Queue(FakeBackend):
    """A backend whose devices others hold until `free` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.free = asyncio.Event()
        self.broken = ""
        self.released: list[tuple[str, str]] = []

    async def claim_devices(self, claim: DeviceClaim) -> QueuePlace | None:
        if self.broken:
            raise BackendError(self.broken)
        return None if self.free.is_set() else QueuePlace(1, "others hold them")

    async def release_devices(self, run_id: str, label: str = "") -> None:
        self.released.append((run_id, label))


async def test_the_time_in_the_queue_counts_for_no_limit(tmp_path: Path) -> None:
    backend = Queue()
    wish = spec(launcher={"max_hours": 1.0 / 3600})
    hooks = LauncherHooks(meter=meter_cost)
    async with serving(tmp_path, backend, hooks=hooks) as served:
        run_id = await served.start(wish, wait=True)
        # Longer than the run may last.
        await asyncio.sleep(1.5)
        run = await served.get(run_id)
        assert (run.state, run.queue_place) == (pb.RUN_STATE_QUEUED, 1)
        assert not (tmp_path / run_id).exists()
        before = time.time()
        backend.free.set()
        early = (pb.RUN_STATE_QUEUED, pb.RUN_STATE_PREFLIGHT)
        await served.until(run_id, lambda r: r.state not in early)
        stored = served.launcher.get_run(run_id)
        assert stored.begun >= before > stored.created + 1.0
        assert json.loads((tmp_path / run_id / "spec.json").read_text())["name"] == "fake"
        events = served.launcher.store.list_events(run_id, 0)
        states = [event.body["state"] for event in events if event.kind == "state"]
        assert states[:3] == ["queued", "preflight", "provisioning"]
        assert "place 1 in the queue: others hold them" in [e.body.get("text") for e in events]


async def test_a_resumed_run_that_leaves_the_queue_is_not_forgotten(tmp_path: Path) -> None:
    backend = Queue()
    backend.free.set()
    async with serving(tmp_path, backend) as served:
        run_id = await served.start(spec())
        await served.runs.StopRun(pb.StopRunRequest(run_id=run_id))
        backend.free.clear()
        again = pb.StartRunRequest(request_id="again", resume_run_id=run_id, wait=True)
        await served.runs.StartRun(again)
        await served.until(run_id, lambda r: r.state == pb.RUN_STATE_QUEUED)
        await served.runs.StopRun(pb.StopRunRequest(run_id=run_id))
        assert (await served.get(run_id)).state == pb.RUN_STATE_STOPPED
        assert (tmp_path / run_id / "spec.json").exists()


async def test_a_begun_run_that_lost_its_devices_waits_again_and_is_not_forgotten(
    tmp_path: Path,
) -> None:
    store, run_id = Ledger(tmp_path / "launcher.sqlite"), "fake-1"
    lost = Replica(ROLLOUT, 0, ReplicaState.RUNNING, unit=Unit("u", 1, 1.0))
    run = Run(run_id, "fake", WANTED, state=RunState.RUNNING).with_replicas([lost])
    store.begin_run(run, json.dumps(spec()), time.time(), {})
    store.save_run(run, [lost], None)
    store.close()
    (tmp_path / run_id).mkdir()
    async with serving(tmp_path, Queue()) as served:
        await served.launcher.recover_runs()
        await served.until(run_id, lambda r: r.state == pb.RUN_STATE_QUEUED)
        await served.runs.StopRun(pb.StopRunRequest(run_id=run_id))
        assert (await served.get(run_id)).state == pb.RUN_STATE_STOPPED


async def test_a_cancelled_request_leaves_the_queue_and_never_begins(tmp_path: Path) -> None:
    backend = Queue()
    async with serving(tmp_path, backend) as served:
        run_id = await served.start(spec(), request_id="mine", wait=True)
        answer = await served.runs.StopRun(pb.StopRunRequest(request_id="mine"))
        assert (answer.run_id, answer.state) == ("", pb.RUN_STATE_UNSPECIFIED)
        assert (run_id, "") in backend.released
        assert served.launcher.store.list_run_ids() == set()
        assert await served.launcher.find_or_prevent_run("mine") == ""


async def test_a_run_whose_devices_are_gone_for_good_is_refused(tmp_path: Path) -> None:
    backend = Queue()
    async with serving(tmp_path, backend) as served:
        run_id = await served.start(spec(), wait=True)
        backend.broken = "the run needs 2 GPUs, this machine has 1"
        run = await served.ended(run_id)
        assert (run.outcome, run.error) == (pb.OUTCOME_REFUSED, backend.broken)


async def test_only_what_was_scaled_away_frees_its_devices_before_the_end(tmp_path: Path) -> None:
    backend = Queue()
    backend.free.set()
    async with serving(tmp_path, backend) as served:
        run_id = await served.start(spec(launcher={"backoff_s": 0.05}))
        await served.until(
            run_id, lambda r: len(r.replicas) == 3 and all(p.pid for p in r.replicas)
        )
        [unit] = backend.list_running("rollout")
        backend.finish_unit(unit, 1)
        await served.until(run_id, lambda r: any(p.restarts for p in r.replicas))
        assert backend.released == []
        for replicas in (2, 1):
            scale = pb.ScaleServiceRequest(run_id=run_id, service="rollout", replicas=replicas)
            await served.runs.ScaleService(scale)
        await served.until(run_id, lambda r: any(p.state == "stopped" for p in r.replicas))
        await served.until(run_id, lambda _: bool(backend.released))
        assert backend.released == [(run_id, "rollout-1")]
