"""Ranks that cost no load of torch each, for tests of what ranks compute."""

from collections.abc import Generator

import pytest

from services.learner.ranks import rank_process
from tests.support.process_forge import ProcessForge, running_forge
from tests.support.rank_configs import LEARNER


@pytest.fixture(scope="module")
def rank_forge() -> Generator[ProcessForge]:
    with running_forge("services.learner.rank.worker", LEARNER.rank.threads) as forge:
        yield forge


@pytest.fixture
def forked_ranks(rank_forge: ProcessForge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the ranks that this process starts forked from one that has loaded torch."""
    monkeypatch.setattr(rank_process, "python_command", rank_forge.python_command)
