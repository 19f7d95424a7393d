"""A runs folder with a cloud, and launchers that come and go; the tests are the run's services."""

import asyncio
import json
import os
import signal
import sqlite3
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from flotilla.launcher.v1 import registry_service_pb2, registry_service_pb2_grpc
from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla.launcher.v1.run_service_pb2_grpc import RunServiceStub
from flotilla_common.rpc import rpc
from flotilla_launcher.cli.launcher_client import LAUNCHER_LOG
from flotilla_launcher.security import certificates, launcher_address
from flotilla_launcher.security.certificates import RunIdentity
from flotilla_launcher.store.ledger import Ledger
from flotilla_launcher.store.row_codec import StoredRun
from tests.faults.launcher_kills.file_cloud import FileCloud
from tests.support.launcher import forged_command, spec
from tests.support.repository import ROOT
from tests.support.waiting import until

SERVICES = ("env_gateway", "learner", "rollout")
ACCEPTING = dict.fromkeys(SERVICES, "tests.support.accepting_service")
WAIT_S = 40.0


@dataclass
class Runs:
    """One runs folder. At most one launcher process serves it, by `command`: a fork of a forge."""

    runs: Path
    command: tuple[str, ...]
    # While it is there, no run passes its preflight.
    hold: Path
    environment: dict[str, str] = field(default_factory=dict[str, str])
    run_id: str = ""
    process: asyncio.subprocess.Process | None = None
    _beats: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, asyncio.Task[None]])

    async def launch(self) -> None:
        """Start a launcher and wait until it serves."""
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *forged_command("-m", *self.command),
                cwd=ROOT,
                env={**os.environ, **self.environment},
                stderr=log,
            )
        await self.until(lambda: launcher_address.read_address(self.runs) is not None)

    async def kill(self) -> None:
        """Kill it as the kernel would, short of memory."""
        address = launcher_address.read_address(self.runs)
        assert self.process is not None and address is not None
        os.kill(address.pid, signal.SIGKILL)
        await self.process.wait()

    async def start(self, wish: dict[str, Any]) -> None:
        request = pb.StartRunRequest(request_id="1", spec_json=json.dumps(wish))
        async with self.stub() as stub:
            self.run_id = (await stub.StartRun(request)).run_id

    async def stop(self, grace_s: float = 5.0) -> None:
        request = pb.StopRunRequest(run_id=self.run_id, grace=rpc.to_duration(grace_s))
        async with self.stub() as stub:
            await stub.StopRun(request, timeout=WAIT_S)

    async def get(self) -> pb.Run:
        async with self.stub() as stub:
            return (await stub.GetRun(pb.GetRunRequest(run_id=self.run_id))).run

    @asynccontextmanager
    async def stub(self) -> AsyncGenerator[Any]:
        address = launcher_address.read_address(self.runs)
        assert address is not None
        async with rpc.channel(address.address, token=address.token) as channel:
            yield RunServiceStub(channel)

    def stored(self) -> StoredRun:
        store = Ledger(self.runs / "launcher.sqlite")
        found = store.get_run(self.run_id)
        store.close()
        assert found is not None
        return found

    def ledger(self, query: str) -> list[tuple[Any, ...]]:
        db = sqlite3.connect(self.runs / "launcher.sqlite")
        try:
            return db.execute(query).fetchall()
        finally:
            db.close()

    def ledger_write(self, statement: str) -> None:
        """Make the ledger wrong, while no launcher runs."""
        db = sqlite3.connect(self.runs / "launcher.sqlite")
        with db:
            db.execute(statement)
        db.close()

    @property
    def log(self) -> Path:
        """The log of all its launchers."""
        return self.runs / LAUNCHER_LOG

    def transitions(self, subject: str) -> list[tuple[str, str, str]]:
        """Return the old and the new state of each logged transition, and its cause."""
        lines = (json.loads(line) for line in self.log.read_text().splitlines() if line[:1] == "{")
        return [
            (line["old"], line["new"], line["cause"])
            for line in lines
            if line["event"] == "transition" and line["subject"] == subject
        ]

    async def until(self, reached: Callable[[], bool]) -> None:
        await until(reached, WAIT_S, lambda: self.stored().run if self.run_id else None)

    async def reached(self, *states: str) -> None:
        await self.until(lambda: self.stored().run.state in states)

    async def ended(self) -> StoredRun:
        await self.until(lambda: self.stored().run.state.has_ended)
        return self.stored()

    def serve(self, *services: str) -> None:
        """Register and beat as replicas 0 of these services, whatever launcher is there."""
        for service in services or SERVICES:
            self._beats[service] = asyncio.create_task(self._beat(service))

    async def _beat(self, service: str) -> None:
        who: dict[str, Any] = {
            "run_id": self.run_id,
            "service": service,
            "replica": 0,
            "incarnation": f"{service}-x",
        }
        while True:
            stored, member = self.stored(), certificates.load_identity(self.runs, self.run_id)
            if stored.registry and member is not None and self.has_machine(service):
                async with self._registry(stored.registry, member, service) as channel:
                    await self._beat_there(service, channel, who)
            await asyncio.sleep(0.1)

    async def _beat_there(self, service: str, channel: Any, who: dict[str, Any]) -> None:
        """Until there is no launcher any more, or none that wants this replica."""
        messages: Any = registry_service_pb2
        stub: Any = registry_service_pb2_grpc.RegistryServiceStub(channel)
        # Servers may be slow where many tests run.
        limits: dict[str, Any] = {"timeout": 5.0, "wait_for_ready": False}
        with suppress(grpc.aio.AioRpcError):
            request = messages.RegisterRequest(**who, address="127.0.0.1:9", pid=1)
            await stub.Register(request, **limits)
            while self.has_machine(service):
                beat = messages.HeartbeatRequest(**who, phase="serving", serving=True)
                self.on_command(service, (await stub.Heartbeat(beat, **limits)).command)
                await asyncio.sleep(0.1)

    def _registry(self, address: str, member: RunIdentity, service: str) -> grpc.aio.Channel:
        tls = None if self.stored().run.backend == "local" else member.tls_for(service)
        return rpc.channel(address, token=member.token, tls=tls, peer="launcher")

    def has_machine(self, service: str) -> bool:
        """Return whether replica 0 is there at all."""
        return True

    def on_command(self, service: str, command: Any) -> None:
        """The launcher has answered a replica's heartbeat."""

    async def close(self) -> None:
        for beat in self._beats.values():
            beat.cancel()
        await asyncio.gather(*self._beats.values(), return_exceptions=True)
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), WAIT_S)
            finally:
                with suppress(ProcessLookupError):
                    self.process.kill()


@dataclass
class Folder(Runs):
    """A launcher's runs, with a cloud in a folder."""

    cloud: FileCloud = field(kw_only=True)

    async def begin(self, **launcher: Any) -> None:
        config = {"modules": ACCEPTING, "clean_s": 10.0, **launcher}
        provision = {"provision": {"backoff_s": 0.05, "attempts": 3}}
        await self.start(spec(launcher={"sky": provision, **config}))


@asynccontextmanager
async def opened(tmp_path: Path) -> AsyncGenerator[Folder]:
    runs, cloud = tmp_path / "runs", tmp_path / "cloud"
    runs.mkdir()
    command = ("tests.faults.launcher_kills.launcher_process", str(runs), str(cloud))
    folder = Folder(runs, command, cloud / "hold", cloud=FileCloud(cloud))
    try:
        await folder.launch()
        yield folder
    finally:
        await folder.close()
