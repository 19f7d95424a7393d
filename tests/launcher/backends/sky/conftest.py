"""A machine backend on SkyPilot's client and a server of the tests in this process."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla_launcher.backends.sky.backend import SkyBackend
from flotilla_launcher.backends.sky.sdk import SkyClient
from tests.support.skypilot.in_process import skypilot_here
from tests.support.skypilot.server import Server

POLL_S = 0.02


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working tree with one commit."""
    root = tmp_path_factory.mktemp("tree")
    who = ("-c", "user.name=t", "-c", "user.email=t@localhost")
    (root / "main.py").write_text("")
    commit = ("commit", "--quiet", "-m", "first")
    for words in (("init", "--quiet"), ("add", "."), commit):
        subprocess.run(("git", "-C", str(root), *who, *words), check=True)
    return root


@pytest.fixture
def sky(tmp_path: Path) -> Iterator[Server]:
    with skypilot_here(tmp_path / "skypilot") as server:
        yield server


@pytest.fixture
def client(sky: Server) -> SkyClient:
    return SkyClient()


@pytest.fixture
def backend(client: SkyClient, tmp_path: Path, root: Path) -> SkyBackend:
    """A backend that trusts no machine without a look."""
    return SkyBackend(tmp_path / "runs", root, client, poll_s=POLL_S, silent_s=0.0)
