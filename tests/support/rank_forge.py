"""The forge of training ranks, started once in a session: torch takes seconds to load."""

import pytest

from tests.support.process_forge import ProcessForge, shared_forge
from tests.support.rank_configs import LEARNER


@pytest.fixture(scope="session")
def rank_forge() -> ProcessForge:
    return shared_rank_forge()


def shared_rank_forge() -> ProcessForge:
    """Return the forge that has loaded torch, transformers, and the programs of a rank and of the
    learner's other children."""
    return shared_forge("tests.support.forged_ranks", LEARNER.rank.threads)
