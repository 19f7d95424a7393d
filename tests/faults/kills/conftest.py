"""One fork server for all tests, and the very small model that they share."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.faults.kills.fork_server import ForkServer, fork_server
from tests.support.shared_folders import SharedFolders


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def server() -> AsyncGenerator[ForkServer]:
    async with fork_server() as found:
        yield found


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def model(
    server: ForkServer, shared_folders: SharedFolders, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """`model_folder`, made without an import of torch into this process."""
    with shared_folders.filling("tied-model") as fresh:
        if fresh is not None:
            await server.run("model", {"folder": fresh}, tmp_path_factory.mktemp("model") / "log")
    return shared_folders.folder("tied-model")
