"""One fork server and one very small model for all tests of a file."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.faults.kills.fork_server import ForkServer, fork_server


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def server() -> AsyncGenerator[ForkServer]:
    async with fork_server() as found:
        yield found


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def model(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    await server.run("model", {"folder": folder}, folder / "log")
    return folder
