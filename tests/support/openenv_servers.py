"""OpenEnv servers as processes, and access to their internals."""

import asyncio
import os
import socket
from pathlib import Path
from typing import cast

import aiohttp

from flotilla_env_gateway.adapters.openenv.backend import OpenEnvBackend
from flotilla_env_gateway.ports import Backend
from tests.support.repository import ROOT
from tests.support.waiting import until

# Another version of the package is tested by naming the interpreter that has it.
PYTHON = os.environ.get("OPENENV_PYTHON", str(ROOT / ".venv-openenv" / "bin" / "python"))


def example_command(kind: str, *options: str) -> list[str]:
    """A server of `openenv_examples.py`, which runs until it is stopped."""
    assert Path(PYTHON).exists(), f"{PYTHON} does not exist: run `make openenv`"
    return [PYTHON, str(Path(__file__).with_name("openenv_examples.py")), kind, *options]


async def sessions(url: str, backend: Backend) -> int:
    """Return how many sessions the server has. It learns of a socket that was dropped a little
    later."""
    expected = len(cast("OpenEnvBackend", backend).channels)
    loop = asyncio.get_running_loop()
    until = loop.time() + 2.0
    async with aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{url}/sessions") as answer:
                active: int = (await answer.json())["active"]
            if active == expected or loop.time() > until:
                return active
            await asyncio.sleep(0.01)


async def cut(backend: Backend, instance_id: str) -> None:
    """Cut the connection of one session, like a network failure."""
    channel = cast("OpenEnvBackend", backend).channels[instance_id]
    connection = cast("socket.socket", channel.socket.get_extra_info("socket"))
    connection.shutdown(socket.SHUT_RDWR)
    await until(lambda: not channel.is_open)
