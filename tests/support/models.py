"""Fixtures of the tiny models that tests of several folders read, each made once in a session.

Libraries of tensors are imported where a model is made: not every environment has them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.shared_folders import SharedFolders


@pytest.fixture(scope="session")
def one_thread() -> None:
    """Have torch sum in one order."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(shared_folders: SharedFolders, one_thread: None) -> Path:
    """A model for training ranks, its head tied to its embedding; no tokenizer."""
    from tests.support.tiny_ranks import write_model

    return shared_folders.filled_by(write_model, "tied-model")


@pytest.fixture(scope="session")
def untied_folder(shared_folders: SharedFolders, one_thread: None) -> Path:
    """The same model with a head of its own."""
    from tests.support.tiny_ranks import write_model

    return shared_folders.filled_by(lambda path: write_model(path, tied=False), "untied-model")


@pytest.fixture(scope="session")
def engine_folder(shared_folders: SharedFolders) -> Path:
    """A model that engines can serve, and its tokenizer."""
    from tests.support.tiny_model import make_model

    return shared_folders.filled_by(make_model, "engine-model")


@pytest.fixture(scope="session")
def vision_folder(shared_folders: SharedFolders, one_thread: None) -> Callable[[str], Path]:
    """Tiny vision models by `model_type`, each with its tokenizer and image processor."""
    from tests.support.vision_models import make_vision_model

    return lambda kind: shared_folders.filled_by(
        lambda path: make_vision_model(path, kind), f"vision-{kind}"
    )
