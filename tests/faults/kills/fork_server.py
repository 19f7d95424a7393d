"""The other side of `zygote`."""

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.process_forge import ProcessForge

START_S = 120.0
LIFE_S = 60.0


class ForkServer:
    """Runs one command after the other, each in a process that is there in milliseconds."""

    def __init__(self, process: Process) -> None:
        self._process = process

    async def begin(self, name: str, arguments: Mapping[str, Any], log: Path) -> int:
        """Start a command; returns its process id."""
        plain = {k: str(v) if isinstance(v, Path) else v for k, v in arguments.items()}
        command = {"name": name, "arguments": plain, "log": str(log)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")
        return (await self._answer(START_S))["pid"]

    async def end(self, limit_s: float = LIFE_S) -> int:
        """Wait for the command's end; negative is the signal that killed it."""
        return (await self._answer(limit_s))["status"]

    async def run(self, name: str, arguments: Mapping[str, Any], log: Path) -> None:
        """A command that must succeed."""
        await self.begin(name, arguments, log)
        status = await self.end()
        assert status == 0, f"{name} ended with {status}:\n{tail(log)}"

    async def _answer(self, limit_s: float) -> dict[str, int]:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), limit_s)
        assert line, "the zygote is gone"
        return json.loads(line)


def tail(log: Path) -> str:
    """The end of a log that may not be there yet."""
    return log.read_text()[-4000:] if log.exists() else ""


@asynccontextmanager
async def fork_server(forge: ProcessForge | None = None) -> AsyncGenerator[ForkServer]:
    """One, for as long as the context lasts, forked from a forge that has loaded torch if there is
    one."""
    words = ("-m", "tests.faults.kills.zygote")
    process = await asyncio.create_subprocess_exec(
        *((sys.executable, *words) if forge is None else forge.python_command(*words)),
        stdin=PIPE,
        stdout=PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield ForkServer(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
