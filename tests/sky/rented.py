"""A launcher in a process of its own on the login host, which rents machines of the emulated cloud.

Its services are stand-ins that register, send heartbeats and end on request; everything
between them and the launcher is real: SkyPilot, machines, watchers, TLS.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import psutil

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla.launcher.v1.run_service_pb2_grpc import RunServiceStub
from flotilla_common.rpc import rpc
from flotilla_launcher.doctor.probe_list import PROBES
from flotilla_launcher.security import launcher_address
from flotilla_launcher.state import GATEWAY, LEARNER, ROLLOUT
from tests.sky.box.layout import LOGIN, ROOT
from tests.sky.session import SkySession

if TYPE_CHECKING:
    from flotilla.launcher.v1.run_service_pb2_grpc import RunServiceAsyncStub

# Two cores give three machines to a run in five minutes, and in more if others use them too.
_LIMIT_S = 1800.0
_POLL_S = 1.0
_START_S = 60.0
# The stand-ins have no model, no tasks and no keys that the doctor could check.
_SKIPPED = sorted({probe.name for probe in PROBES} - {"clouds", "secrets"})
CPU = {"infra": "lambda/us-south-1", "cpus": "4"}


def gpu(region: str, kind: str = "H100") -> dict[str, str]:
    return {"infra": f"lambda/{region}", "accelerators": f"{kind}:1"}


def spec(session: SkySession, *, sky: dict[str, Any] | None = None, **launcher: Any) -> str:
    """A run of one learner, one gateway and one rollout, each on a machine of the cloud."""
    services = (LEARNER, GATEWAY, ROLLOUT)
    machines = {service: {"ordered": [CPU]} for service in services}
    settings = {
        "setup": "true",
        "python": sys.executable,
        "commit": "HEAD",
        "advertise": session.layout.address(LOGIN),
        "provision": {"backoff_s": 1.0},
        **machines,
        **(sky or {}),
    }
    own = {
        "backend": "sky",
        "sky": settings,
        "modules": {service: f"tests.support.fake_{service}" for service in services},
        "skip_probes": _SKIPPED,
        "max_hours": 0.5,
        "drain_s": 20.0,
        **launcher,
    }
    policy = {"model": "none", "max_model_len": 8}
    learner = {"steps": 100_000, "step_s": 0.5}
    return json.dumps(
        {"name": "rent", "seed": 0, "policy": policy, "learner": learner, "launcher": own}
    )


@dataclass(slots=True)
class Rented:
    """A launcher that runs, and a client of it."""

    runs: Path
    stub: "RunServiceAsyncStub"
    # The messages of its runs to people.
    messages: list[str] = field(default_factory=list[str])
    _watches: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])

    async def start(self, spec_json: str) -> str:
        request = pb.StartRunRequest(request_id=str(time.time_ns()), spec_json=spec_json)
        run_id = (await self.stub.StartRun(request)).run_id
        self._watches.append(asyncio.create_task(self._watch(run_id)))
        return run_id

    async def get(self, run_id: str) -> pb.Run:
        return (await self.stub.GetRun(pb.GetRunRequest(run_id=run_id))).run

    async def until(
        self, run_id: str, reached: Callable[[pb.Run], bool], limit_s: float = _LIMIT_S
    ) -> pb.Run:
        deadline = time.monotonic() + limit_s
        while True:
            run = await self.get(run_id)
            if reached(run):
                return run
            shown = "\n".join(self.messages)
            assert time.monotonic() < deadline, f"waited {limit_s:.0f} s; {run}\n{shown}"
            await asyncio.sleep(_POLL_S)

    async def running(self, run_id: str) -> pb.Run:
        """Wait until all services serve. A run that ends instead is a failure."""
        run = await self.until(run_id, lambda run: run.state >= pb.RUN_STATE_RUNNING)
        assert run.state == pb.RUN_STATE_RUNNING, f"{run}\n{self.messages}"
        return run

    async def notified(self, *words: str) -> None:
        """Wait until a message contains all these words."""
        deadline = time.monotonic() + _LIMIT_S
        while not any(all(word in text for word in words) for text in self.messages):
            assert time.monotonic() < deadline, f"no message with {words}: {self.messages}"
            await asyncio.sleep(_POLL_S)

    async def stop(self, run_id: str) -> pb.Run:
        """Stop the run and return it, whatever became of its machines."""
        request = pb.StopRunRequest(run_id=run_id)
        request.grace.FromSeconds(20)
        await self.stub.StopRun(request, timeout=_LIMIT_S)
        return await self.get(run_id)

    async def _watch(self, run_id: str) -> None:
        seen = 0
        while True:
            request = pb.WatchRunRequest(run_id=run_id, after_event=seen)
            with suppress(grpc.aio.AioRpcError):
                async for event in self.stub.WatchRun(request):
                    seen = event.event
                    if event.message:
                        self.messages.append(event.message)
            await asyncio.sleep(_POLL_S)

    def forget(self) -> None:
        for watch in self._watches:
            watch.cancel()


@asynccontextmanager
async def launcher(runs: Path) -> AsyncGenerator[Rented]:
    """A launcher for this folder; at the end it drains its runs and exits."""
    await asyncio.to_thread(runs.mkdir, parents=True, exist_ok=True)
    python_path = f"{ROOT}:{ROOT / 'gen'}"
    with (runs / "launcher.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "flotilla_launcher", "--runs", str(runs)),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": python_path},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        address = await _address(runs, process)
        async with rpc.channel(address.address, token=address.token) as channel:
            stub: Any = RunServiceStub(channel)
            rented = Rented(runs, stub)
            try:
                yield rented
            finally:
                rented.forget()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _address(
    runs: Path, process: asyncio.subprocess.Process
) -> launcher_address.LauncherAddress:
    deadline = time.monotonic() + _START_S
    while (address := launcher_address.read_address(runs)) is None:
        alive = process.returncode is None and time.monotonic() < deadline
        assert alive, (runs / "launcher.log").read_text()
        await asyncio.sleep(0.1)
    return address


def service_process(run_id: str, service: str) -> tuple[int, float]:
    """Id and start of the process of a run's service, on any machine: machines are
    namespaces of this one."""
    found = [process for process in psutil.process_iter() if _is(process, run_id, service)]
    [process] = found
    return process.pid, process.create_time()


def _is(process: psutil.Process, run_id: str, service: str) -> bool:
    try:
        command = process.cmdline()
    except psutil.Error:
        # It has ended meanwhile.
        return False
    module = f"tests.support.fake_{service}"
    # Its watcher has the same words behind its own module.
    return command[1:4] == ["-P", "-m", module] and run_id in command
