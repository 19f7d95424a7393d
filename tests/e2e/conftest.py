"""A policy that passes a few tasks in ten, made in seconds."""

from pathlib import Path

import pytest

from environments.api import ENV_KEYS
from tools.tiny_policy.build import Recipe, build
from tools.tiny_policy.demonstrator import Habits
from tools.tiny_policy.train import Schedule

# A policy that never passes gives groups without a signal, and training would leave it as it is.
# With fewer steps it never does, and without laziness it takes the fewest.
QUICK = Recipe(
    demonstrations=1_200,
    habits=Habits(lazy=dict.fromkeys(ENV_KEYS, 0.0)),
    schedule=Schedule(steps=300),
)


@pytest.fixture(scope="session")
def quick_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy folder, the same bits each time."""
    folder = tmp_path_factory.mktemp("policy") / "quick"
    assert build(folder, QUICK)
    return folder
