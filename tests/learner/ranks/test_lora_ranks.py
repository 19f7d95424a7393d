"""Ranks train adapters as one rank does: each with a whole base, or with a part of it."""

import asyncio
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.rank.adapter_files import BaseRecord
from flotilla_learner.rank.rank_setup import RankSetup, load_models
from flotilla_learner.rank.rendezvous_store import host_store
from flotilla_learner.ranks.local_ranks import LocalRanks
from flotilla_learner.types import StepResult
from tests.learner.ranks.test_sharded_ranks import (
    STEPS,
    TOLERANCE,
    assert_same,
    configured,
    train,
    weights_of,
)
from tests.support.checkpoints import save_ranks, write_checkpoint
from tests.support.lone_ranks import start_alone
from tests.support.rank_configs import policy_config
from tests.support.tiny_ranks import make_batch, make_trainer, write_model, write_sparse_model

LORA = LoraConfig(rank=4, alpha=8)
KL = {"kl": {"coefficient": 0.05}}
VALUES = {**KL, "advantage": "gae", "critic": {"lr": 1e-3}}
Trained = tuple[list[StepResult], dict[str, np.ndarray], Path]


async def trained_by(
    model: Path,
    folder: Path,
    processes: int,
    *,
    shard: bool = True,
    algorithm: dict[str, Any] = KL,
    checkpoint: Path | None = None,
    steps: range = range(1, STEPS + 1),
    adapter_rank: int | None = None,
) -> Trained:
    """Return the results of steps, the weights of the last one, and the checkpoint after it."""
    await asyncio.to_thread(folder.mkdir)
    base = configured(processes)
    chosen = base.algorithm.model_validate(algorithm)
    rank = base.rank.model_copy(update={"shard": shard})
    config = base.model_copy(update={"lora": LORA, "algorithm": chosen, "rank": rank})
    policy = policy_config(model, adapter_rank=adapter_rank)
    ranks = LocalRanks("lora", policy, config, folder / "rank.log", folder)
    try:
        info = await ranks.start_ranks(checkpoint)
        assert (info.reference is None) is (adapter_rank is not None)
        results = await train(ranks, steps)
        publication = await ranks.publish_weights(steps[-1])
        files = await save_ranks(ranks, folder / "checkpoint")
        # The slot's file goes with the ranks.
        weights = weights_of(publication)
    finally:
        await ranks.close()
    return results, weights, files.directory


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "processes", "shard", "algorithm", "adapter_rank"),
    [
        ("tied", 2, True, VALUES, None),
        ("tied", 2, False, KL, None),
        ("untied", 4, True, KL, None),
        ("experts", 2, True, VALUES, None),
        ("tied", 2, True, VALUES, LORA.rank),
    ],
)
async def test_they_make_the_same_steps_as_one(
    kind: str,
    processes: int,
    shard: bool,
    algorithm: dict[str, Any],
    adapter_rank: int | None,
    tmp_path: Path,
) -> None:
    model = tmp_path / "model"
    if kind == "experts":
        write_sparse_model(model)
    else:
        write_model(model, tied=kind == "tied")
    trained = partial(trained_by, model, algorithm=algorithm, adapter_rank=adapter_rank)
    alone, published, _ = await trained(tmp_path / "alone", 1)
    several, others, saved = await trained(tmp_path / "several", processes, shard=shard)
    for one, other in zip(alone, several, strict=True):
        for name in ("policy/loss", "policy/grad_norm", "policy/kl"):
            assert other.metrics[name] == pytest.approx(one.metrics[name], abs=TOLERANCE), name
    assert alone[-1].metrics["policy/kl"] > 0
    assert_same(published, others)
    # One rank resumes where several stopped.
    step = range(STEPS + 1, STEPS + 2)
    resuming = partial(trained, checkpoint=saved, steps=step)
    (resumed,), _, _ = await resuming(tmp_path / "resumed", 1)
    (straight,), _, _ = await resuming(tmp_path / "again", processes, shard=shard)
    loss = straight.metrics["policy/loss"]
    assert resumed.metrics["policy/loss"] == pytest.approx(loss, abs=TOLERANCE)


def load_from_the_first(setup: dict[str, Any], reported: Connection) -> None:
    """A rank on its own machine; only the first machine has the checkpoint."""
    place, seen = setup["place"], str(Path(setup["shm_dir"]).with_name("checkpoint"))
    changes = {
        "place": {**place, "slots": 1, "slot": 0},
        "rank": {**setup["rank"], "shard": False},
        "checkpoint": seen if place["index"] == 0 else None,
        "lora": LORA.model_dump(mode="json"),
    }
    models = load_models(RankSetup.model_validate({**setup, **changes}))
    held = {**models.policy.trained_parameters(), **models.optimizer.state_tensors()}
    reported.send((models.step, {name: value.detach().numpy() for name, value in held.items()}))


@pytest.mark.slow
def test_a_rank_elsewhere_gets_the_adapters_and_their_moments(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    policy, optimizer, trainer = make_trainer(model, lora=LORA)
    trainer.train_step(make_batch(), lr=1e-2)
    record = BaseRecord.of_policy(policy, policy_config(model))
    write_checkpoint(tmp_path / "checkpoint", policy, optimizer, 1, record)
    expected = {**policy.trained_parameters(), **optimizer.state_tensors()}
    # Machines meet at an address.
    _store, meeting = host_store("127.0.0.1")
    given = (policy_config(model), configured(2), tmp_path / "ranks", meeting)
    for step, held in start_alone(load_from_the_first, *given):
        assert step == 1
        assert held.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(held[name], value.detach().numpy(), err_msg=name)
