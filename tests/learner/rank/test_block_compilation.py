"""Compiled decoder blocks: the same steps and names, few graphs, a way on without a compiler."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._inductor import codecache
from torch._inductor import config as inductor
from torch._inductor.utils import clear_caches

from flotilla_learner.algo.packing import Segments
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank import block_compilation
from flotilla_learner.rank.block_compilation import CACHE_VARIABLE, default_cache
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.trainer import Trainer
from flotilla_learner.types import StepResult
from tests.support.rank_configs import policy_config
from tests.support.tiny_ranks import (
    VOCAB,
    make_prompted_batch,
    trained_parameters,
    write_sparse_model,
)

# Torch's own as it compiles: it hides the first unless warnings are errors, Python the second.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
LORA = LoraConfig(rank=4, alpha=8)
EVERYTHING: dict[str, Any] = {
    "advantage": "gae",
    "critic": {"lr": 1e-3},
    "kl": {"coefficient": 0.05},
    "proximal": "trainer",
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One folder of compiled code for all tests here: most compile the same."""
    folder = tmp_path_factory.getbasetemp() / "compiled"
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def train(
    folder: Path,
    *,
    lora: LoraConfig | None = None,
    algorithm: dict[str, Any] | None = None,
    steps: int = 3,
    **rank: object,
) -> tuple[Policy, list[StepResult]]:
    values = {"pack_tokens": 256, "head_chunk": 16, **rank}
    config = RankConfig.model_validate(values)
    policy = load_policy(policy_config(folder), config, lora=lora)
    # Where a gradient is next to nothing its rounding would else move a weight by the rate.
    optimizer = OptimizerConfig(lr=1e-3).model_copy(update={"eps": 1e-4})
    adamw = Optimizer(policy.trained_parameters(), optimizer)
    trainer = Trainer(policy, adamw, AlgorithmConfig.model_validate(algorithm or {}), config)
    return policy, [
        trainer.train_step(make_prompted_batch(step=step), 1e-3) for step in range(1, steps + 1)
    ]


def assert_same_steps(
    one: tuple[Policy, list[StepResult]], other: tuple[Policy, list[StepResult]]
) -> None:
    for plain, compiled in zip(one[1], other[1], strict=True):
        for name, value in plain.metrics.items():
            assert compiled.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    ours, theirs = (trained_parameters(policy) for policy, _ in (one, other))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=0, atol=1e-5, msg=name)
    names = [list(policy.model.state_dict()) for policy, _ in (one, other)]
    assert names[0] == names[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("plain", {}),
        ("everything", {"gradient_checkpointing": "full", "offload_activations": True}),
        ("lora", {"gradient_checkpointing": "full"}),
        ("experts", {}),
    ],
)
def test_it_makes_the_steps_that_it_makes_uncompiled(
    kind: str, settings: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    folder = write_sparse_model(tmp_path / "model") if kind == "experts" else model_folder
    given: dict[str, Any] = {
        "lora": LORA if kind == "lora" else None,
        "algorithm": EVERYTHING if kind in ("everything", "lora") else {},
        **settings,
    }
    plain = train(folder, **given)
    compiled = train(folder, **given, compile=True)
    assert_same_steps(plain, compiled)
    found = [result.metrics for result in compiled[1]]
    assert found[0]["policy/compiled_graphs"] > 0
    assert all(metrics["policy/uncompiled_blocks"] == 0 for metrics in found)
    assert "policy/compiled_graphs" not in plain[1][0].metrics


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_packs_of_other_segments_compile_nothing_more(model_folder: Path) -> None:
    rank = RankConfig.model_validate({"compile": True})
    policy = load_policy(policy_config(model_folder), rank)
    compiled = policy.compiled
    assert compiled is not None
    rng = np.random.default_rng(0)

    def compute(lengths: list[int], parents: list[int | None] | None = None) -> None:
        ids = [rng.integers(0, VOCAB, length).astype(np.int32) for length in lengths]
        policy.pass_idly(Segments(ids, parents))
        with torch.no_grad():
            policy.segment_states(Segments(ids, parents))

    compute([9, 5])
    # Of one token, as of a rank that has nothing to compute, torch makes graphs of their own.
    compute([1])
    assert compiled.take_graph_count() > 0
    for _ in range(30):
        lengths = [int(length) for length in rng.integers(1, 30, rng.integers(2, 9))]
        shared: list[int | None] = [None, *[0] * (len(lengths) - 1)]
        compute(lengths, shared if rng.random() < 0.5 else None)
    assert compiled.take_graph_count() == 0
    assert compiled.uncompiled == 0


@pytest.mark.slow
def test_a_compiler_that_the_environment_has_disabled_is_logged(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with caplog.at_level(logging.WARNING):
        refused = train(model_folder, compile=True)
    assert_same_steps(train(model_folder), refused)
    [message] = [line for line in caplog.messages if "learner.rank.compile" in line]
    assert "every block runs uncompiled" in message and "TORCHDYNAMO_DISABLE" in message


def test_without_a_compiler_it_runs_uncompiled_and_warns_once(
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Nothing that an earlier test has compiled.
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "compiled"))
    plain = train(model_folder)
    # Undone by monkeypatch, the setting would be gone.
    without = inductor.patch({"cpp.cxx": ("no-such-compiler",)})
    with caplog.at_level(logging.WARNING), without:
        refused = train(model_folder, compile=True)
    assert_same_steps(plain, refused)
    message = [line for line in caplog.messages if "learner.rank.compile" in line]
    assert len(message) == 1
    assert "Qwen3DecoderLayer runs uncompiled" in message[0] and "compiler" in message[0]
    layers = plain[0].config.num_hidden_layers
    assert [result.metrics["policy/uncompiled_blocks"] for result in refused[1]] == [layers] * 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_too_many_variants_of_a_block_are_logged(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(block_compilation, "_MOST_VARIANTS", 1)
    with caplog.at_level(logging.WARNING):
        # Scores are computed without gradients, losses with them.
        refused = train(model_folder, compile=True, algorithm={"proximal": "trainer"})
    assert_same_steps(train(model_folder, algorithm={"proximal": "trainer"}), refused)
    message = [line for line in caplog.messages if "learner.rank.compile" in line]
    assert len(message) == 1 and "recompile_limit" in message[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_compiled_code_lies_where_it_is_to_and_nowhere_else(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, headers = tmp_path / "compiled", tmp_path / "headers"
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))
    monkeypatch.setattr(codecache, "_HEADER_DIR", str(headers))
    # What an earlier test has compiled is still in this process.
    clear_caches()
    train(model_folder, compile=True, steps=1)
    assert os.environ[CACHE_VARIABLE] == str(cache)
    assert list(cache.rglob("*.so"))
    assert not headers.exists()


def test_compiled_code_is_kept_in_a_folder_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache() == tmp_path / ".cache" / "flotilla" / "compiled"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    assert default_cache() == tmp_path / "own" / "flotilla" / "compiled"
