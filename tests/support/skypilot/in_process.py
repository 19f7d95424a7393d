"""SkyPilot of the tests as `import sky` finds it, with its server in this process."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.skypilot.server import SDK, Server, served

_VARIABLES = ("SKYPILOT_DISABLE_LOCAL_API_SERVER", "SKYPILOT_DISABLE_USAGE_COLLECTION")


@contextmanager
def sdk_at(address: str) -> Generator[None]:
    """Have `import sky` find the client of the tests, which calls the server at this address."""
    before = {name: sys.modules.pop(name) for name in _skys()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKYPILOT_API_SERVER_ENDPOINT", address)
        for name in _VARIABLES:
            patch.setenv(name, "1")
        patch.syspath_prepend(str(SDK))
        yield
    for name in _skys():
        del sys.modules[name]
    sys.modules.update(before)


@contextmanager
def skypilot_here(folder: Path) -> Generator[Server]:
    """Run a server on machines that run nothing."""
    folder.mkdir()
    server = Server(folder)
    with served(server) as address, sdk_at(address):
        yield server


def _skys() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "sky"]
