"""Policies for runs and engines, made once."""

from pathlib import Path

import pytest

from flotilla_environments.api import ENV_KEYS
from flotilla_environments.tiny_policy.build import Recipe, build
from flotilla_environments.tiny_policy.demonstrator import Habits
from flotilla_environments.tiny_policy.train import Schedule
from tests.e2e.wide_model import make_folder
from tests.support.repository import ROOT
from tests.support.shared_folders import SharedFolders

# A policy that never passes gives groups without a signal, and training would leave it as it is.
# With fewer steps it never does, and without laziness it takes the fewest.
QUICK = Recipe(
    demonstrations=1_200,
    habits=Habits(lazy=dict.fromkeys(ENV_KEYS, 0.0)),
    schedule=Schedule(steps=300),
)


@pytest.fixture(scope="session")
def quick_policy() -> Path:
    """A policy folder, the same bits each time; kept until what it is made from changes."""
    folder = ROOT / "build/quick-policy"
    build(folder, QUICK)
    return folder


@pytest.fixture(scope="session")
def wide_folder(shared_folders: SharedFolders) -> Path:
    """The architecture of Qwen3-8B, small."""
    return shared_folders.filled_by(make_folder, "wide-model")
