import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flotilla_learner.algo.advantages import ADVANTAGES
from flotilla_learner.algo.objective import Objective
from flotilla_learner.algo.plugin_registry import Registry, load_plugins
from tests.learner.algo.support import config
from tests.support.repository import ROOT

DOCUMENT = ROOT / "docs" / "algorithms.md"
OWN_MODULE = """
import numpy as np
import torch

from flotilla_learner.plugins import ADVANTAGES, LOSSES, TokenLoss


@ADVANTAGES.register("reward_itself")
def reward_itself(batch, config):
    return [np.full(len(t), r) for r, t in zip(batch.rewards, batch.token_rewards)]


@LOSSES.register("sum_of_sequence", coupled=True)
def sum_of_sequence(tokens, config):
    loss = -tokens.logprobs.sum() * tokens.advantages
    return TokenLoss(loss, torch.zeros_like(loss, dtype=torch.bool))
"""


# What a rank does with it.
PROGRAM = """
import json
import numpy as np
import torch
from flotilla_learner.algo.objective import Objective
from flotilla_learner.algo.plugin_registry import load_plugins
from flotilla_learner.plugins import *

config = AlgorithmConfig(
    plugins=("a_users_own", "my_algorithms"), advantage="reward_itself", loss="sum_of_sequence"
)
load_plugins(config.plugins)
load_plugins(config.plugins)
batch = BatchRewards(["g", "g"], [0, 1], [0.5, 0.25], [np.zeros(1), np.zeros(2)])
logprobs = torch.tensor([-1.0, -2.0])
tokens = LossInput(logprobs, logprobs, torch.ones(2), torch.tensor([0, 0]), 1)
print(json.dumps([
    [values.tolist() for values in ADVANTAGES.get(config.advantage)(batch, config)],
    LOSSES.get(config.loss)(tokens, config).loss.tolist(),
    Objective(config).coupled,
    [values.tolist() for values in ADVANTAGES.get("best_of_group")(batch, config)],
    LOSSES.get("reinforce")(tokens, config).loss.tolist(),
]))
"""


def test_modules_of_ones_own_bring_estimators_and_losses(tmp_path: Path) -> None:
    (tmp_path / "a_users_own.py").write_text(OWN_MODULE)
    (documented,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (tmp_path / "my_algorithms.py").write_text(documented)
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    advantages, loss, coupled, *of_the_document = json.loads(found.stdout)
    assert advantages == [[0.5], [0.25, 0.25]]
    assert loss == [3.0, 3.0]
    assert coupled is True
    assert of_the_document == [[[0.5], [-0.5, -0.5]], [1.0, 2.0]]


def test_an_unregistered_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"unknown advantage 'gpro': did you mean 'grpo'\?"):
        ADVANTAGES.get("gpro")
    chosen = config(plugins=["json"], loss="xyz")
    with pytest.raises(ValueError, match=r"unknown loss 'xyz': known are cispo.*plugins names"):
        Objective(chosen)


def test_a_name_is_given_once() -> None:
    registry: Registry[int] = Registry("thing")
    registry.register("one")(1)
    with pytest.raises(ValueError, match="thing 'one' is already registered"):
        registry.register("one")(2)
    assert registry.get("one") == 1
    assert registry.names == ("one",)


def test_a_module_that_cannot_be_imported_is_named() -> None:
    with pytest.raises(ValueError, match=r"plugins: 'no_such_module' cannot be imported"):
        load_plugins(["no_such_module"])


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose modules are found first; what is imported of these names is forgotten."""
    monkeypatch.syspath_prepend(tmp_path)
    _forget_own_modules()
    yield tmp_path
    _forget_own_modules()


def _forget_own_modules() -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] in ("services", "environments", "of_ones_own"):
            del sys.modules[name]


def test_a_module_that_imports_an_old_name_is_told_the_new_one(own_folder: Path) -> None:
    (own_folder / "of_ones_own.py").write_text("from services.learner.algo.losses import LOSSES\n")
    told = (
        "'of_ones_own' cannot be imported: No module named 'services.*';"
        " services.learner.algo.losses is flotilla_learner.algo.losses now;"
        " plugins import from flotilla_learner.plugins"
    )
    with pytest.raises(ValueError, match=told):
        load_plugins(["of_ones_own"])


def test_a_package_of_ones_own_may_have_the_name_that_ours_had(own_folder: Path) -> None:
    for package in ("services", "environments"):
        (own_folder / package).mkdir()
        (own_folder / package / "__init__.py").touch()
        (own_folder / package / "learner.py").write_text("LOADED = True\n")
    text = "from services.learner import LOADED\nimport environments.learner\n"
    (own_folder / "of_ones_own.py").write_text(text)
    load_plugins(["of_ones_own"])
    assert sys.modules["of_ones_own"].LOADED
