"""Ranks that cost no load of torch each, for tests of what ranks compute."""

import pytest

from flotilla_learner.ranks import rank_process
from tests.support.process_forge import ProcessForge


@pytest.fixture
def forked_ranks(rank_forge: ProcessForge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the ranks that this process starts forked from one that has loaded torch."""
    monkeypatch.setattr(rank_process, "python_command", rank_forge.python_command)
