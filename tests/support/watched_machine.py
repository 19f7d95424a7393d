"""A machine for one replica: a real watcher process, and a launcher that can go and come back."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import psutil

from flotilla.launcher.v1 import registry_service_pb2_grpc
from flotilla_common.rpc import rpc
from flotilla_common.rpc.free_ports import free_address
from flotilla_common.rpc.tls import Tls
from flotilla_launcher.agent_protocol import UnitReport
from flotilla_launcher.api.registry_service import RegistryService
from flotilla_launcher.control.supervisor import Supervisor
from flotilla_launcher.security.certificates import mint_identity
from flotilla_launcher.state import SERVICES
from tests.support.fake_backend import FakeBackend
from tests.support.launcher import TOKEN, ServedLauncher, forged_command, serving, spec
from tests.support.repository import ROOT
from tests.support.waiting import until

WORKER = (sys.executable, "-m", "tests.support.watched_worker")


class Registry:
    """RegistryService of a launcher, which goes away and comes back at the same port."""

    def __init__(self, served: ServedLauncher, tls: Tls | None) -> None:
        self._served = served
        self._tls = tls
        self._stack = AsyncExitStack()
        self.address = free_address()

    async def up(self) -> None:
        server = rpc.server(token=TOKEN)
        registry_service_pb2_grpc.add_RegistryServiceServicer_to_server(
            RegistryService(self._served.launcher), server
        )
        serving = rpc.serving(server, self.address, tls=self._tls, grace_s=0.0)
        await self._stack.enter_async_context(serving)

    async def down(self) -> None:
        await self._stack.aclose()


@dataclass
class WatchedMachine:
    """A machine on which the watcher runs, and its run."""

    folder: Path
    served: ServedLauncher
    registry: Registry
    run_id: str
    secrets: dict[str, str]
    backend: FakeBackend
    processes: list[asyncio.subprocess.Process] = field(
        default_factory=list[asyncio.subprocess.Process]
    )

    @property
    def run_dir(self) -> Path:
        return self.folder / self.run_id

    @property
    def supervisor(self) -> Supervisor:
        supervisor = self.served.launcher.get_supervisor(self.run_id)
        assert supervisor is not None
        return supervisor

    @property
    def output(self) -> str:
        """Return the watchers' own output."""
        return (self.folder / "output").read_text()

    async def watch(
        self,
        *does: str,
        service: str = "rollout",
        options: tuple[str, ...] = (),
        forged: bool = True,
    ) -> asyncio.subprocess.Process:
        """Start a watcher over a worker; a `forged` one is the stand-in for a fork of a forge."""
        words = ("-m", "flotilla_launcher.agent", *self._options(service))
        command = forged_command(*words) if forged else (sys.executable, *words)
        with (self.folder / "output").open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(*command, *options, "--", *WORKER, *does),
                cwd=ROOT,
                env={**os.environ, **self.secrets, "TMPDIR": str(self.temporary)},
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    async def kill(self, process: asyncio.subprocess.Process) -> None:
        """Kill a watcher, also one that `process` stands for, and wait for its end."""
        worker = psutil.Process(int(self.log().rpartition("begins, pid ")[2].split()[0]))
        os.kill(worker.ppid(), signal.SIGKILL)
        await process.wait()

    @property
    def temporary(self) -> Path:
        folder = self.folder / "tmp"
        folder.mkdir(exist_ok=True)
        return folder

    def _options(self, service: str) -> list[str]:
        options = ["--config", str(self.folder / "spec.json"), "--service", service]
        options += ["--replica", "0", "--run-id", self.run_id, "--run-dir", str(self.run_dir)]
        return [*options, "--registry", self.registry.address]

    def log(self, service: str = "rollout") -> str:
        """The replica's log as the launcher has it."""
        path = self.served.launcher.folder / self.run_id / "logs" / f"{service}-0.log"
        return path.read_text() if path.exists() else ""

    def last(self, service: str = "rollout") -> UnitReport | None:
        """Return the last report of its watcher."""
        return self.supervisor.units.last_report((service, 0))

    async def until(self, reached: Callable[[], bool], limit_s: float = 40.0) -> None:
        await until(reached, limit_s, self.state)

    def state(self) -> str:
        """Return the facts that explain a test that waits in vain."""
        return f"waited in vain:\n{self.output[-4000:]}\n{self.log()[-2000:]}"

    async def begins(self) -> int:
        """Wait until the launcher has the worker's first line; returns its pid."""
        await self.until(lambda: "begins, pid" in self.log())
        return int(self.log().partition("pid ")[2].split()[0])

    def left(self) -> list[psutil.Process]:
        """Every process of the unit."""
        mark = str(self.folder)
        return [process for process in psutil.process_iter() if _is_marked(process, mark)]

    def release(self) -> None:
        """Have the backend's units end, now and on request."""
        self.backend.stubborn = False
        for service in SERVICES:
            for unit in self.backend.list_running(service):
                self.backend.finish_unit(unit)

    def end(self) -> None:
        for process in self.processes:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.left():
            process.kill()


def _is_marked(process: psutil.Process, folder: str) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process.environ().get("FLOTILLA_UNIT", "").startswith(folder)
    except (psutil.Error, OSError):
        # Ended meanwhile, or another user's.
        return False


@asynccontextmanager
async def machine(
    folder: Path,
    *,
    lease_s: float = 20.0,
    learner: dict[str, Any] | None = None,
    tls: bool = False,
    **launcher: Any,
) -> AsyncGenerator[WatchedMachine]:
    """A run whose units no backend starts for real, and a machine for its rollout."""
    runs, here = folder / "runs", folder / "machine"
    runs.mkdir()
    here.mkdir()
    spot = {"sky": {"unit_lease_s": lease_s, **launcher.pop("sky", {})}}
    wish = spec(launcher={"max_restarts": 2, **spot, **launcher}, learner=learner or {})
    (here / "spec.json").write_text(json.dumps(wish))
    backend = FakeBackend()
    backend.stubborn = True
    async with serving(runs, backend) as served:
        run_id = await served.start(wish)
        identity = mint_identity(run_id) if tls else None
        registry = Registry(served, identity.tls_for("launcher") if identity else None)
        await registry.up()
        secrets = {"FLOTILLA_TOKEN": TOKEN}
        if identity is not None:
            secrets["FLOTILLA_TLS"] = identity.tls_for("rollout").to_text()
        found = WatchedMachine(here, served, registry, run_id, secrets, backend)
        try:
            yield found
        finally:
            found.end()
            await registry.down()
            found.release()


@contextmanager
def metadata_server(answers: dict[str, str]) -> Generator[str]:
    """A cloud's metadata server: paths to texts, anything else is 404; may change meanwhile."""

    class MetadataHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = answers.get(self.path)
            body = (text or "").encode()
            self.send_response(404 if text is None else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """No test reads the log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), MetadataHandler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
