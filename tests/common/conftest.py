"""Servers and processes for the tests of the common library."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import grpc.aio
import pytest_asyncio

from flotilla_common.rpc import rpc
from tests.support import echo_service
from tests.support.repository import ROOT
from tests.support.started_process import start_beside

StartProcess = Callable[[str], Awaitable[tuple[asyncio.subprocess.Process, str]]]
Serve = Callable[..., Awaitable[grpc.aio.Channel]]


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serves the echo service with extra unary methods; gives a channel to it."""
    async with AsyncExitStack() as stack:

        async def start(**unary: echo_service.Unary) -> grpc.aio.Channel:
            server = rpc.server(token=echo_service.TOKEN)
            echo_service.add(server, **unary)
            serving = await stack.enter_async_context(
                rpc.serving(server, "127.0.0.1:0", grace_s=0.1)
            )
            channel = rpc.channel(serving.address, token=echo_service.TOKEN)
            return await stack.enter_async_context(channel)

        yield start


@pytest_asyncio.fixture
async def echo_process() -> AsyncIterator[StartProcess]:
    """Starts the echo service in a process of its own; gives the process and its address."""
    processes: list[asyncio.subprocess.Process] = []

    async def start(listen: str = "127.0.0.1:0") -> tuple[asyncio.subprocess.Process, str]:
        command = (sys.executable, "-m", "tests.support.echo_service", listen)
        process, line = await start_beside(command, cwd=ROOT)
        processes.append(process)
        return process, line.strip()

    yield start
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.wait()
