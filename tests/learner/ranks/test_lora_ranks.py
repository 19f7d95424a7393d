"""Ranks train adapters as one rank does: each with a whole base, or with a part of it."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from services.learner.config.lora import LoraConfig
from services.learner.ranks.local_ranks import LocalRanks
from services.learner.types import Publication, StepResult
from tests.learner.ranks.test_sharded_ranks import (
    STEPS,
    TOLERANCE,
    assert_same,
    configured,
    train,
    weights_of,
)
from tests.support.checkpoints import save_ranks
from tests.support.rank_configs import policy_config
from tests.support.tiny_ranks import write_model, write_sparse_model

LORA = LoraConfig(rank=4, alpha=8)
KL = {"kl": {"coefficient": 0.05}}
VALUES = {**KL, "advantage": "gae", "critic": {"lr": 1e-3}}
Trained = tuple[list[StepResult], Publication, Path]


async def trained_by(
    model: Path,
    folder: Path,
    processes: int,
    *,
    shard: bool = True,
    algorithm: dict[str, Any] = KL,
    checkpoint: Path | None = None,
    steps: range = range(1, STEPS + 1),
) -> Trained:
    """Return the results of steps, the last publication, and the checkpoint after them."""
    await asyncio.to_thread(folder.mkdir)
    base = configured(processes)
    chosen = base.algorithm.model_validate(algorithm)
    rank = base.rank.model_copy(update={"shard": shard})
    config = base.model_copy(update={"lora": LORA, "algorithm": chosen, "rank": rank})
    ranks = LocalRanks("lora", policy_config(model), config, folder / "rank.log", folder)
    try:
        info = await ranks.start_ranks(checkpoint)
        assert info.reference is not None
        results = await train(ranks, steps)
        publication = await ranks.publish_weights(steps[-1])
        files = await save_ranks(ranks, folder / "checkpoint")
        # The slot's file goes with the ranks.
        kept = folder / "kept.safetensors"
        save_file(weights_of(publication), kept)
    finally:
        await ranks.close()
    return results, replace(publication, path=kept), files.directory


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "processes", "shard", "algorithm"),
    [
        ("tied", 2, True, VALUES),
        ("tied", 2, False, KL),
        ("untied", 4, True, KL),
        ("experts", 2, True, VALUES),
    ],
)
async def test_they_make_the_same_steps_as_one(
    kind: str, processes: int, shard: bool, algorithm: dict[str, Any], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    if kind == "experts":
        write_sparse_model(model)
    else:
        write_model(model, tied=kind == "tied")
    trained = partial(trained_by, model, algorithm=algorithm)
    alone, published, _ = await trained(tmp_path / "alone", 1)
    several, others, saved = await trained(tmp_path / "several", processes, shard=shard)
    for one, other in zip(alone, several, strict=True):
        for name in ("policy/loss", "policy/grad_norm", "policy/kl"):
            assert other.metrics[name] == pytest.approx(one.metrics[name], abs=TOLERANCE), name
    assert alone[-1].metrics["policy/kl"] > 0
    assert_same(weights_of(published), weights_of(others))
    # One rank goes on from where several stopped.
    step = range(STEPS + 1, STEPS + 2)
    resuming = partial(trained, checkpoint=saved, steps=step)
    (resumed,), _, _ = await resuming(tmp_path / "resumed", 1)
    (straight,), _, _ = await resuming(tmp_path / "again", processes, shard=shard)
    loss = straight.metrics["policy/loss"]
    assert resumed.metrics["policy/loss"] == pytest.approx(loss, abs=TOLERANCE)
