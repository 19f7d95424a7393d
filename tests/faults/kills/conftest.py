"""One fork server for all tests, the very small model that they share, and what runs of ranks need
besides."""

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from tests.faults.kills.fork_server import ForkServer, fork_server
from tests.support.process_forge import ProcessForge
from tests.support.shared_folders import SharedFolders

if TYPE_CHECKING:
    from tests.faults.kills.sharded_setting import ShardedSetting


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def server(rank_forge: ProcessForge) -> AsyncGenerator[ForkServer]:
    async with fork_server(rank_forge) as found:
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


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def vision_model(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that sees pictures."""
    folder = tmp_path_factory.mktemp("vision") / "model"
    await server.run("vision-model", {"folder": folder}, folder.with_name("log"))
    return folder


@pytest.fixture
def setting(
    server: ForkServer,
    model: Path,
    tmp_path: Path,
    rank_forge: ProcessForge,
    monkeypatch: pytest.MonkeyPatch,
) -> "ShardedSetting":
    # It imports torch, which other tests of this package do without.
    from tests.faults.kills.sharded_setting import ShardedSetting

    return ShardedSetting(server, model, tmp_path, rank_forge, monkeypatch)
