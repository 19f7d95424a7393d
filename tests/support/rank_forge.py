"""The forge of training ranks, started once in a session: torch takes seconds to load."""

from collections.abc import Generator

import pytest

from tests.support.process_forge import ProcessForge, running_forge
from tests.support.rank_configs import LEARNER


@pytest.fixture(scope="session")
def rank_forge() -> Generator[ProcessForge]:
    """A forge that has loaded torch, transformers and the program of a rank."""
    with running_forge("services.learner.rank.worker", LEARNER.rank.threads) as forge:
        yield forge
