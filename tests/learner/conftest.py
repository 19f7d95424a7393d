"""Tiny random models, made once for all tests of the ranks."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def one_thread() -> None:
    """Have torch count in one order."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    from tests.support.tiny_ranks import write_model

    return write_model(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def untied_folder(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    from tests.support.tiny_ranks import write_model

    return write_model(tmp_path_factory.mktemp("untied"), tied=False)
