"""The three services of a run as processes under TLS, on an address that others could reach."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_launcher.security import certificates
from tests.faults.harness import ROLLOUT
from tests.support.outsiders import RUN, beyond_loopback, run

_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Node:
    """A service that serves: its process, and where."""

    process: asyncio.subprocess.Process
    address: str


class Nodes:
    """Starts services of one run, each with its own part of the run's identity."""

    def __init__(self, folder: Path, spec: Mapping[str, Any]) -> None:
        self.folder = folder / RUN
        self._spec = folder / "spec.json"
        self._spec.write_text(json.dumps(spec))
        certificates.store_identity(folder, run())
        self._identity = certificates.identity_folder(folder, RUN)
        self._started: list[asyncio.subprocess.Process] = []

    async def start(
        self, service: str, *arguments: str, module: str | None = None, limit_s: float = _START_S
    ) -> Node:
        """Until it serves. Its log is `SERVICE.log`."""
        module = module or (ROLLOUT if service == "rollout" else f"flotilla_{service}")
        run_dir, listen = str(self.folder), f"{beyond_loopback()}:0"
        log = self.folder.with_name(f"{service}.log")
        process = await self._run(
            service, module, log, "--run-dir", run_dir, "--listen", listen, *arguments
        )
        return Node(process, await _serving(process, log, limit_s))

    async def further(self, learner: Node, *arguments: str) -> asyncio.subprocess.Process:
        """A second machine of the learner, with a folder of its own."""
        return await self.second_machine(
            "learner", "flotilla_learner.ranks", learner.address, *arguments
        )

    async def second_machine(
        self, service: str, module: str, address: str, *arguments: str
    ) -> asyncio.subprocess.Process:
        """A second machine of the service at this address, with a folder of its own."""
        folder = self.folder.with_name(f"{service}-node-1")
        return await self._run(
            *(service, module, folder.with_suffix(".log")),
            *("--run-dir", str(folder), "--replica", "1"),
            *("--peer", f"{service}={address}", *arguments),
        )

    async def _run(
        self, service: str, module: str, log: Path, *arguments: str
    ) -> asyncio.subprocess.Process:
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module, "--config", str(self._spec), "--run-id", RUN),
                *("--tls-dir", str(self._identity / service)),
                *("--token-file", str(self._identity / "token")),
                *arguments,
                env={**os.environ, "FLOTILLA_TOKEN": ""},
                stdin=asyncio.subprocess.DEVNULL,
                stderr=file,
            )
        self._started.append(process)
        return process

    async def end(self) -> None:
        for process in self._started:
            if process.returncode is None:
                process.terminate()
        for process in self._started:
            await process.wait()


@asynccontextmanager
async def nodes(folder: Path, spec: Mapping[str, Any]) -> AsyncGenerator[Nodes]:
    """Nodes that end with the block."""
    made = Nodes(folder, spec)
    try:
        yield made
    finally:
        await made.end()


async def _serving(process: asyncio.subprocess.Process, log: Path, limit_s: float) -> str:
    """The address that a process logs as its own."""
    async with asyncio.timeout(limit_s):
        while process.returncode is None:
            if address := _address(log):
                return address
            await asyncio.sleep(0.05)
    raise AssertionError(f"it ended with code {process.returncode}; see {log}")


def _address(log: Path) -> str | None:
    for line in log.read_bytes().splitlines(keepends=True):
        if b'"event": "serving"' in line and line.endswith(b"\n"):
            return json.loads(line)["address"]
    return None
