"""A machine backend on an in-memory SkyPilot."""

import subprocess
from pathlib import Path

import pytest

from services.launcher.backends.sky.backend import SkyBackend
from tests.support.fake_sky import FakeSky


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
def sky() -> FakeSky:
    return FakeSky()


@pytest.fixture
def backend(sky: FakeSky, tmp_path: Path, root: Path) -> SkyBackend:
    return SkyBackend(tmp_path / "runs", root, sky, poll_s=0.02, gather_s=0.05)
