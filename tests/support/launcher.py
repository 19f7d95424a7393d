"""A launcher with fake services, in this process or in one of its own."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import psutil
from typer.testing import CliRunner

from flotilla.launcher.v1 import (
    registry_service_pb2_grpc,
    run_service_pb2,
    run_service_pb2_grpc,
)
from flotilla_common.rpc import rpc
from flotilla_launcher.api.registry_service import RegistryService
from flotilla_launcher.api.run_service import RunService
from flotilla_launcher.backends.local.backend import LocalBackend
from flotilla_launcher.backends.local.marked_processes import MARK_VARIABLE
from flotilla_launcher.backends.ports import Backend
from flotilla_launcher.cli.app import app
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.control.launcher import Launcher, LauncherDependencies
from flotilla_launcher.ports import NO_HOOKS, LauncherHooks
from flotilla_launcher.store.ledger import Ledger
from tests.support.fake_entry import FORGE_VARIABLE
from tests.support.process_forge import ProcessForge, shared_forge
from tests.support.repository import ROOT
from tests.support.waiting import until_seen

if TYPE_CHECKING:
    from flotilla.launcher.v1.registry_service_pb2_grpc import RegistryServiceAsyncStub
    from flotilla.launcher.v1.run_service_pb2_grpc import RunServiceAsyncStub

TOKEN = "a-token-for-tests-that-is-long-enough"
ENDED = (
    run_service_pb2.RUN_STATE_COMPLETED,
    run_service_pb2.RUN_STATE_FAILED,
    run_service_pb2.RUN_STATE_STOPPED,
)


def spec(**sections: Any) -> dict[str, Any]:
    """Return a run spec of fakes with short times."""
    modules = {s: f"tests.support.fake_{s}" for s in ("learner", "rollout", "env_gateway")}
    launcher: dict[str, Any] = {
        "modules": modules,
        "backoff_s": 0.05,
        "heartbeat_interval_s": 0.1,
        "drain_s": 5.0,
        **sections.pop("launcher", {}),
    }
    policy = {"model": "none", "max_model_len": 8}
    return {"name": "fake", "seed": 0, "policy": policy, "launcher": launcher, **sections}


@dataclass(frozen=True, slots=True)
class ServedLauncher:
    """A launcher that serves, and clients of it."""

    launcher: Launcher
    runs: "RunServiceAsyncStub"
    registry: "RegistryServiceAsyncStub"
    address: str = ""

    async def start(
        self, wish: dict[str, Any], *, timeout_s: float | None = None, **fields: Any
    ) -> str:
        fields.setdefault("request_id", f"request-{time.monotonic_ns()}")
        request = run_service_pb2.StartRunRequest(spec_json=json.dumps(wish), **fields)
        return (await self.runs.StartRun(request, timeout=timeout_s)).run_id

    async def get(self, run_id: str) -> run_service_pb2.Run:
        answer = await self.runs.GetRun(run_service_pb2.GetRunRequest(run_id=run_id))
        return answer.run

    async def until(
        self, run_id: str, reached: Callable[[run_service_pb2.Run], bool], limit_s: float = 30.0
    ) -> run_service_pb2.Run:
        """Wait until the run is as wished."""
        return await until_seen(lambda: self.get(run_id), reached, limit_s)

    async def ended(self, run_id: str) -> run_service_pb2.Run:
        return await self.until(run_id, lambda run: run.state in ENDED)


@dataclass(slots=True)
class OneRegistry:
    """All runs on one server with one token, which the tests know."""

    address: str = ""

    def secrets_for(self, service: str) -> dict[str, str]:
        return {"FLOTILLA_TOKEN": TOKEN}

    async def open_registry(
        self, run_id: str, config: LauncherConfig, remembered: str
    ) -> "OneRegistry":
        return self

    async def close(self, run_id: str, *, forget: bool) -> None:
        """It serves the other runs."""


@asynccontextmanager
async def serving(
    folder: Path,
    backend: Backend | None = None,
    *,
    stream_age_s: float = 60.0,
    hooks: LauncherHooks = NO_HOOKS,
) -> AsyncGenerator[ServedLauncher]:
    """A launcher over real sockets; its runs are stopped in the end."""
    with patch.dict(os.environ, forged_fakes()):
        async with _served(folder, backend, stream_age_s, hooks) as served:
            yield served


def forged_fakes() -> dict[str, str]:
    """Return the environment in which fake services are forks of a forge."""
    return {FORGE_VARIABLE: str(_forge().address)}


def forged_command(*words: str) -> tuple[str, ...]:
    """Return a command that runs Python with these words, `-m` and a module of the launcher first,
    in a process that has imported the launcher."""
    return _forge().python_command(*words)


def _forge() -> ProcessForge:
    """Return the forge of launchers and fake services."""
    return shared_forge("tests.support.forged_launcher")


@asynccontextmanager
async def _served(
    folder: Path, backend: Backend | None, stream_age_s: float, hooks: LauncherHooks
) -> AsyncGenerator[ServedLauncher]:
    store, registry = Ledger(folder / "launcher.sqlite"), OneRegistry()
    chosen = backend or LocalBackend(folder)
    launcher = Launcher(
        folder, store, LauncherDependencies({"local": lambda: chosen}, registry, hooks)
    )
    server = rpc.server(token=TOKEN)
    run_service_pb2_grpc.add_RunServiceServicer_to_server(
        RunService(launcher, stream_age_s), server
    )
    registry_service_pb2_grpc.add_RegistryServiceServicer_to_server(
        RegistryService(launcher, stream_age_s), server
    )
    async with rpc.serving(server, "127.0.0.1:0", grace_s=0.2) as at:
        registry.address = at.address
        async with rpc.channel(at.address, token=TOKEN) as channel:
            runs: Any = run_service_pb2_grpc.RunServiceStub(channel)
            registry: Any = registry_service_pb2_grpc.RegistryServiceStub(channel)
            yield ServedLauncher(launcher, runs, registry, at.address)
            await launcher.close(2.0)
    store.close()


async def start_cli(*arguments: str, forged: bool = False) -> asyncio.subprocess.Process:
    """The `flotilla` command with its output in a pipe; the fakes of its launcher are forks of a
    forge, and it is one itself if it is `forged`."""
    words = ("-m", "flotilla_launcher.cli.app", *arguments)
    return await asyncio.create_subprocess_exec(
        *(forged_command(*words) if forged else (sys.executable, *words)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=ROOT,
        env={**os.environ, **forged_fakes()},
        start_new_session=True,
    )


async def run_cli_here(*arguments: str) -> tuple[int, str]:
    """Run a command that starts nothing in this process: its exit code and its output."""
    result = await asyncio.to_thread(CliRunner().invoke, app, arguments)
    return result.exit_code, result.output


def left_running(folder: Path) -> list[psutil.Process]:
    """Return the launchers of this folder and all processes that they have started."""
    return [process for process in psutil.process_iter() if _is_of(process, str(folder))]


def _is_of(process: psutil.Process, folder: str) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        marked = process.environ().get(MARK_VARIABLE, "").startswith(f"{folder}:")
        return marked or (folder in process.cmdline() and "flotilla_launcher" in process.cmdline())
    except (psutil.Error, OSError):
        # Ended meanwhile, or another user's.
        return False
