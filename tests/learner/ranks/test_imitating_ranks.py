"""Rank processes that imitate: a share of a batch each, whole copies or parts, as one rank does."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flotilla_learner.ranks.local_ranks import LocalRanks
from flotilla_learner.ranks.protocol import read_tokens
from flotilla_learner.types import BatchScore
from tests.learner.rank.test_trainer_imitation import demonstrations
from tests.support.rank_configs import LEARNER, policy_config


async def train_and_score(
    model: Path, folder: Path, processes: int, *, shard: bool = False
) -> tuple[list[float], list[BatchScore]]:
    """The losses of three steps, and a score before each."""
    own = {"processes": processes, "shard": shard, "pack_tokens": 64}
    rank = LEARNER.rank.model_copy(update=own)
    config = LEARNER.model_copy(update={"rank": rank})
    name = f"ranks-{processes}"
    ranks = LocalRanks(name, policy_config(model), config, folder / f"{name}.log", folder)
    losses: list[float] = []
    scores: list[BatchScore] = []
    try:
        await ranks.start_ranks(None)
        for step in range(1, 4):
            scores.append(await ranks.score_batch(replace(demonstrations(9), step=step)))
            batch = demonstrations(step)
            result = await ranks.train_step(batch)
            assert result.token_file is not None
            told = read_tokens(result.token_file).logprobs
            result.token_file.unlink()
            assert [len(each) for each in told] == [s.policy_mask.sum() for s in batch.sequences]
            mean = -float(np.concatenate(told).mean())
            assert mean == pytest.approx(result.metrics["policy/loss"], abs=1e-5)
            losses.append(result.metrics["policy/loss"])
    finally:
        await ranks.close()
    return losses, scores


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("shard", [False, True])
async def test_two_train_and_score_as_one_does(
    model_folder: Path, tmp_path: Path, *, shard: bool
) -> None:
    losses, scores = await train_and_score(model_folder, tmp_path, 1)
    others, other_scores = await train_and_score(model_folder, tmp_path, 2, shard=shard)
    assert others == pytest.approx(losses, abs=1e-5)
    for one, other in zip(scores, other_scores, strict=True):
        assert one.tokens == other.tokens
        assert other.loss == pytest.approx(one.loss, abs=1e-5)
    assert scores[2].loss != scores[0].loss
    assert not any("batch" in name for name in os.listdir(tmp_path))
