"""A tokenizer and a policy trained for a few steps, made once for all tests."""

from dataclasses import replace
from pathlib import Path

import pytest

from flotilla_environments.tiny_policy.build import Recipe, build
from flotilla_environments.tiny_policy.train import Schedule
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer, load_tokenizer
from flotilla_rollout.dialects.template import TemplateDialect
from tests.support.shared_folders import SharedFolders

MINI = Recipe(demonstrations=64, schedule=Schedule(steps=20))
MINI_OTHER_SEED = replace(MINI, seed=1)


@pytest.fixture(scope="session")
def policy_folder(shared_folders: SharedFolders) -> Path:
    """A folder built by `MINI`: everything real, but hardly trained."""
    return shared_folders.filled_by(lambda path: build(path, MINI), "mini-policy")


@pytest.fixture(scope="session")
def tokenizer(policy_folder: Path) -> TransformersTokenizer:
    return load_tokenizer(policy_folder)


@pytest.fixture(scope="session")
def dialect(tokenizer: TransformersTokenizer) -> TemplateDialect:
    return TemplateDialect(tokenizer)
