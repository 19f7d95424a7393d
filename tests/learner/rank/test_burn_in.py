"""The longest pack is tried before the first step, and nothing of it stays."""

import resource
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.burn_in import BurnIn
from flotilla_learner.rank.rank_setup import RankModels, RankSetup, load_models
from flotilla_learner.ranks.burn_in import BurnInMemoryError, BurnInPeaks
from tests.support.rank_configs import ALONE, EVERYTHING, policy_config
from tests.support.tiny_ranks import make_batch, parameters, same_bits

ALGORITHMS: dict[str, dict[str, object]] = {
    "plain": {},
    "everything": EVERYTHING,
    "coupled": {"loss": "gspo"},
}


def load(folder: Path, algorithm: str = "plain", pack_tokens: int = 256) -> RankModels:
    return load_models(
        RankSetup(
            name="run",
            shm_dir=folder,
            total_steps=4,
            policy=policy_config(folder),
            algorithm=AlgorithmConfig.model_validate(ALGORITHMS[algorithm]),
            optimizer=OptimizerConfig(lr=1e-2),
            rank=RankConfig(pack_tokens=pack_tokens, head_chunk=16),
            place=ALONE,  # pyright: ignore[reportArgumentType]
        )
    )


def burn_in(models: RankModels, algorithm: str = "plain", pack_tokens: int = 256) -> BurnInPeaks:
    rank = RankConfig(pack_tokens=pack_tokens, head_chunk=16)
    chosen = AlgorithmConfig.model_validate(ALGORITHMS[algorithm])
    trial = BurnIn(models.policy, models.critic, models.optimizer, chosen, rank)
    return trial.run(models.policy.max_model_len or 0)


def state(models: RankModels) -> dict[str, torch.Tensor]:
    critic = models.critic.state_tensors() if models.critic is not None else {}
    moments = {f"moments.{name}": t for name, t in models.optimizer.state_tensors().items()}
    return {
        name: t.clone() for name, t in {**parameters(models.policy), **critic, **moments}.items()
    }


@contextmanager
def memory_left(least: int) -> Generator[None]:
    """Let this process have only so many bytes more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + least, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("algorithm", list(ALGORITHMS))
def test_a_run_with_it_makes_the_same_bits(model_folder: Path, algorithm: str) -> None:
    found: list[tuple[object, dict[str, torch.Tensor]]] = []
    for tried in (True, False):
        models = load(model_folder, algorithm)
        before = state(models)
        if tried:
            assert burn_in(models, algorithm).tokens == 256
            assert same_bits(before, state(models))
            assert not models.optimizer.gradients
        metrics = models.trainer.train_step(make_batch(step=1), 1e-2).metrics
        # One whose run has moments already leaves these as they are, too.
        if tried:
            burn_in(models, algorithm)
        later = models.trainer.train_step(make_batch(step=2), 1e-2).metrics
        found.append(((metrics, later), state(models)))
    assert found[0][0] == found[1][0]
    assert same_bits(found[0][1], found[1][1])


def test_it_reports_what_it_took(model_folder: Path) -> None:
    peaks = burn_in(load(model_folder), pack_tokens=512)
    assert peaks.tokens == 512
    assert peaks.seconds > 0
    assert peaks.host >= psutil.Process().memory_info().rss
    assert peaks.device == 0


def test_what_takes_too_much_memory_is_refused_and_leaves_no_gradient(model_folder: Path) -> None:
    models = load(model_folder)
    before = state(models)
    # Much more than earlier tests may have freed in this process.
    with memory_left(2**26), pytest.raises(BurnInMemoryError, match="a pack of 1048576 tokens: "):
        burn_in(models, pack_tokens=2**20)
    assert same_bits(before, state(models))
    assert not models.optimizer.gradients
    assert burn_in(models).tokens == 256
