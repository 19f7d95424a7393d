"""Several ranks, with whole models or with parts, replay the engine's experts as one does."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.ranks.local_ranks import LocalRanks
from flotilla_learner.types import ExpertShape, TrainBatch
from tests.support.rank_configs import LEARNER, policy_config
from tests.support.tiny_ranks import make_batch, write_sparse_model

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
SHAPE = ExpertShape(layers=2, experts=4, chosen=2)
ALGORITHM = AlgorithmConfig.model_validate(
    {"proximal": "trainer", "mini_batches": 2, "epochs": 2, "kl": {"coefficient": 0.05}}
)


@asynccontextmanager
async def started(model: Path, folder: Path, **changes: object) -> AsyncGenerator[LocalRanks]:
    rank = LEARNER.rank.model_copy(update={"pack_tokens": 128, **changes})
    # Adam's first steps are as large as the rate wherever a gradient is next to nothing.
    optimizer = LEARNER.optimizer.model_copy(update={"lr": 1e-3})
    update = {"rank": rank, "optimizer": optimizer, "algorithm": ALGORITHM}
    policy = policy_config(model, routing_replay="replay")
    config = LEARNER.model_copy(update=update)
    ranks = LocalRanks("replay", policy, config, folder / "replay.log", folder)
    try:
        info = await ranks.start_ranks(None)
        assert info.experts == SHAPE
        yield ranks
    finally:
        await ranks.close()


def batch_of(step: int) -> TrainBatch:
    """Sequences with experts at random, of some tokens or of all but the last."""
    rng = np.random.default_rng(step)
    batch = make_batch(step=step)
    sequences = [
        replace(s, experts=draw_experts(rng, len(s.token_ids) - 1 - 5 * (index % 3)))
        for index, s in enumerate(batch.sequences)
    ]
    return replace(batch, sequences=tuple(sequences))


def draw_experts(rng: np.random.Generator, tokens: int) -> np.ndarray:
    every = np.tile(np.arange(SHAPE.experts, dtype=np.uint8), (tokens, SHAPE.layers, 1))
    return rng.permuted(every, axis=-1)[..., : SHAPE.chosen]


@pytest.mark.parametrize("shard", [False, True])
async def test_two_ranks_make_the_steps_of_one(shard: bool, tmp_path: Path) -> None:
    write_sparse_model(tmp_path / "model")
    found: list[tuple[list[dict[str, float]], dict[str, np.ndarray]]] = []
    for changes in ({}, {"processes": 2, "shard": shard}):
        async with started(tmp_path / "model", tmp_path, **changes) as ranks:
            metrics = [
                dict((await ranks.train_step(batch_of(step))).metrics) for step in range(1, 4)
            ]
            compared = await ranks.compare_batch(batch_of(4), diagnose=False)
            published = await ranks.publish_weights(3)
            metrics.append({"abs_diff": compared.versions[3].abs_diff})
            found.append((metrics, load_file(published.path)))
    (alone, weights), (several, shared) = found
    for one, other in zip(alone, several, strict=True):
        assert other.keys() == one.keys()
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=TOLERANCE, abs=10 * TOLERANCE), name
    assert 0.5 < alone[0]["mismatch/rerouted_choices"] < 1
    assert several[0]["mismatch/rerouted_choices"] == alone[0]["mismatch/rerouted_choices"]
    for name, value in weights.items():
        np.testing.assert_allclose(shared[name], value, rtol=0, atol=TOLERANCE, err_msg=name)
