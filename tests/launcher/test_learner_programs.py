"""The learner's programs, where they are and where they are not."""

import subprocess
import sys

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_launcher import learner_programs
from tests.support.repository import ROOT

# What a launcher's environment lacks of the learner's packages.
_LACKING = ("peft", "safetensors", "tensorboard", "torch", "transformers", "wandb")
_IMPORT = """
import importlib, sys
program, *lacking = sys.argv[1:]
sys.modules.update(dict.fromkeys(lacking))
importlib.import_module(program)
"""


@pytest.mark.parametrize("program", [learner_programs.RESTORE, learner_programs.ACCEPT_LOSS])
def test_a_run_is_restored_and_read_without_the_packages_that_train(program: str) -> None:
    command = (sys.executable, "-c", _IMPORT, program, *_LACKING)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_launcher_without_the_learner_says_how_to_get_its_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learner_programs, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'flotilla-rl\[learner\]'"):
        learner_programs.learner_command(learner_programs.RESTORE, "file:///store")
