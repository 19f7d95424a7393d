"""Processes that read a model's texts without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from flotilla_common.process.python_command import python_command
from tests.support.repository import ROOT

_PROGRAM = """
import sys
from flotilla_common.spec.spec import PolicyConfig, SharedConfig
from flotilla_rollout.__main__ import check_here
from flotilla_rollout.config.rollout import DialectConfig, RolloutConfig

policy = PolicyConfig(model=sys.argv[1], max_model_len=64)
config = RolloutConfig(max_input_length=8, max_generate_length=8, dialect=DialectConfig())
check_here(SharedConfig(name="x", policy=policy), config)
print("transformers" in sys.modules, sys.modules["torch"])
"""


@pytest.mark.slow
def test_a_models_dialect_is_checked_without_torch_and_without_a_word_of_it(
    engine_folder: Path,
) -> None:
    done = subprocess.run(
        python_command("-c", _PROGRAM, str(engine_folder)),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    # The model's template shows no descriptions of tools, which is said first.
    *said, last = done.stdout.splitlines()
    assert (last, done.stderr) == ("True None", "")
    assert [line for line in said if "torch" in line.lower()] == []


def test_torch_that_is_loaded_stays() -> None:
    import torch

    from flotilla_common.adapters.hidden_torch import hide_torch

    hide_torch()
    assert sys.modules["torch"] is torch
