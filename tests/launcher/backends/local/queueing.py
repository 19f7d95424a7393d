"""Launchers in processes of their own on a machine with one GPU, which is only a name."""

import asyncio
import json
import os
import signal
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import psutil

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla.launcher.v1.run_service_pb2_grpc import RunServiceStub
from flotilla_common.rpc import rpc
from flotilla_launcher.security.launcher_address import read_address
from flotilla_launcher.store.ledger import Ledger
from tests.support.launcher import left_running, spec
from tests.support.launcher_process import address_of, start_launcher
from tests.support.waiting import until_seen

# Busy machines start processes slowly.
WAIT_S = 60.0


def gpu_name() -> str:
    """Return the name of a GPU that no other test has: all of a user's share one table."""
    return f"GPU-{uuid.uuid4()}"


def wish(**sections: Any) -> dict[str, Any]:
    """Return a spec of a run that has one GPU and no end."""
    launcher = {"backoff_s": 0.3, "max_restarts": 50, "rollout": {"gpus": 1}}
    return spec(launcher={**launcher, **sections.pop("launcher", {})}, **learning(), **sections)


def learning() -> dict[str, Any]:
    return {"learner": {"steps": 10**6, "step_s": 0.1}}


@dataclass
class Machine:
    """A runs folder and the launcher process that serves it, if one does."""

    runs: Path
    gpus: str
    process: asyncio.subprocess.Process | None = None
    _numbers: list[int] = field(default_factory=list[int])

    async def launch(self) -> None:
        self.process = await start_launcher(self.runs, CUDA_VISIBLE_DEVICES=self.gpus)

    async def kill_launcher(self) -> None:
        address = read_address(self.runs)
        assert address is not None and self.process is not None
        os.kill(address.pid, signal.SIGKILL)
        await self.process.wait()

    @asynccontextmanager
    async def stub(self) -> AsyncGenerator[Any]:
        assert self.process is not None
        address = await address_of(self.runs, self.process)
        async with rpc.channel(address.address, token=address.token) as channel:
            yield RunServiceStub(channel)

    async def start(self, **fields: Any) -> str:
        self._numbers.append(0)
        given: dict[str, Any] = {
            "request_id": str(len(self._numbers)),
            "spec_json": json.dumps(wish()),
            **fields,
        }
        async with self.stub() as stub:
            return (await stub.StartRun(pb.StartRunRequest(**given), timeout=WAIT_S)).run_id

    async def refused(self, **fields: Any) -> str:
        """Start a run that is refused; return the reason."""
        try:
            run_id = await self.start(**fields)
        except grpc.aio.AioRpcError as error:
            known = rpc.service_error(error)
            assert known is not None and known.reason == "NO_DEVICES", error
            return known.message
        raise AssertionError(f"{run_id} was started")

    async def get(self, run_id: str) -> pb.Run:
        async with self.stub() as stub:
            return (await stub.GetRun(pb.GetRunRequest(run_id=run_id), timeout=WAIT_S)).run

    async def until(self, run_id: str, reached: Callable[[pb.Run], bool]) -> pb.Run:
        return await until_seen(lambda: self.get(run_id), reached, WAIT_S)

    async def running(self, run_id: str) -> pb.Run:
        return await self.until(run_id, is_running)

    async def stop(self, run_id: str) -> None:
        request = pb.StopRunRequest(run_id=run_id, grace=rpc.to_duration(5.0))
        async with self.stub() as stub:
            await stub.StopRun(request, timeout=WAIT_S)

    async def scale(self, run_id: str, replicas: int) -> None:
        request = pb.ScaleServiceRequest(run_id=run_id, service="rollout", replicas=replicas)
        async with self.stub() as stub:
            await stub.ScaleService(request, timeout=WAIT_S)

    async def places(self, *run_ids: str) -> list[int]:
        return [(await self.get(run_id)).queue_place for run_id in run_ids]

    def known_runs(self) -> set[str]:
        store = Ledger(self.runs / "launcher.sqlite")
        found = store.list_run_ids()
        store.close()
        return found


def is_running(run: pb.Run) -> bool:
    replicas = [each for each in run.replicas if each.state != "stopped"]
    serve = bool(replicas) and all(map(_serves, replicas))
    return run.state == pb.RUN_STATE_RUNNING and serve


def rollouts(run: pb.Run) -> list[pb.ServiceReplica]:
    return [each for each in run.replicas if each.service == "rollout" and _serves(each)]


def _serves(replica: pb.ServiceReplica) -> bool:
    # A service may register before its launcher has noted which process it is.
    return replica.state == "running" and replica.pid > 0


def gpus_seen(replica: pb.ServiceReplica) -> str:
    return psutil.Process(replica.pid).environ()["CUDA_VISIBLE_DEVICES"]


@asynccontextmanager
async def machine(folder: Path, gpus: str) -> AsyncGenerator[Machine]:
    """A launcher that serves; in the end nothing of it is left."""
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    found = Machine(folder, gpus)
    try:
        await found.launch()
        yield found
    finally:
        for process in await asyncio.to_thread(left_running, folder):
            process.send_signal(signal.SIGKILL)
        if found.process is not None:
            await found.process.wait()
