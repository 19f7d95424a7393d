"""One server for all tests of a session, and clients of it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tinker.client.served import INSTALLED, Served, client_of, new_trainer, serving
from tests.tinker.client.stage import find_stage


@pytest.fixture(scope="session")
def stage() -> Path:
    if not INSTALLED:
        pytest.skip("Tinker's client is not in this environment: make test-tinker")
    return find_stage()


@pytest.fixture(scope="session")
def served(stage: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(stage, tmp_path_factory.mktemp("tinker-state")) as one:
        yield one


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    with client_of(served) as one:
        yield one


@pytest.fixture
def trainer(client: Any) -> Any:
    """A LoRA model, rank 8."""
    return new_trainer(client)
