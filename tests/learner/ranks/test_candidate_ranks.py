"""Several ranks, with whole models or with parts, and adapters, score tokens among their candidates
as one rank does."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.ranks.local_ranks import LocalRanks
from tests.learner.rank.test_candidates import EVERYTHING, with_candidates
from tests.support.rank_configs import LEARNER, policy_config
from tests.support.tiny_ranks import make_prompted_batch, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TOLERANCE = 1e-5
ALGORITHM = AlgorithmConfig.model_validate({**EVERYTHING, "mini_batches": 2})


@asynccontextmanager
async def started(
    model: Path, folder: Path, lora: LoraConfig | None, **changes: object
) -> AsyncGenerator[LocalRanks]:
    rank = LEARNER.rank.model_copy(update={"pack_tokens": 128, "head_chunk": 11, **changes})
    # Adam's first steps are as large as the rate wherever a gradient is next to nothing.
    optimizer = LEARNER.optimizer.model_copy(update={"lr": 1e-3})
    update: dict[str, Any] = {"rank": rank, "optimizer": optimizer, "algorithm": ALGORITHM}
    config = LEARNER.model_copy(update={**update, "lora": lora})
    ranks = LocalRanks("candidates", policy_config(model), config, folder / "ranks.log", folder)
    try:
        await ranks.start_ranks(None)
        yield ranks
    finally:
        await ranks.close()


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["whole", "adapters"])
async def test_two_ranks_with_parts_make_the_steps_of_one(
    lora: LoraConfig | None, tmp_path: Path
) -> None:
    write_model(tmp_path / "model")
    found: list[tuple[list[dict[str, float]], dict[str, np.ndarray]]] = []
    for changes in ({}, {"processes": 2, "shard": True}):
        async with started(tmp_path / "model", tmp_path, lora, **changes) as ranks:
            batches = [with_candidates(make_prompted_batch(step=n), seed=n) for n in (1, 2, 3)]
            metrics = [dict((await ranks.train_step(batch)).metrics) for batch in batches[:2]]
            compared = await ranks.compare_batch(batches[2], diagnose=False)
            published = await ranks.publish_weights(2)
            metrics.append({"abs_diff": compared.versions[2].abs_diff})
            found.append((metrics, load_file(published.path)))
    (alone, weights), (several, shared) = found
    for one, other in zip(alone, several, strict=True):
        assert other.keys() == one.keys()
        for name, value in one.items():
            # Prompts are computed once on each rank.
            if name == "policy/shared_prompt_share":
                continue
            assert other[name] == pytest.approx(value, rel=TOLERANCE, abs=10 * TOLERANCE), name
    # Of at most 9 candidates, not of the whole vocabulary.
    assert 0 < alone[0]["policy/entropy"] < np.log(9)
    for name, value in weights.items():
        np.testing.assert_allclose(shared[name], value, rtol=0, atol=TOLERANCE, err_msg=name)
