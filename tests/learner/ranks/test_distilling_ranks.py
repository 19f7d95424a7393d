"""Rank processes that distil: their teacher's scores reach them, and any number of ranks, in whole
copies or parts, with or without adapters, trains as one does."""

from pathlib import Path
from typing import Any

import pytest

from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.ranks.local_ranks import LocalRanks
from tests.learner.rank.test_trainer_distillation import K, distilling, teach
from tests.support.rank_configs import LEARNER, policy_config
from tests.support.tiny_ranks import make_batch

STEPS = 3


async def distil(
    model: Path, folder: Path, processes: int, *, adapters: bool, **rank: Any
) -> list[list[float]]:
    """Loss, divergence and reverse KL of each step."""
    own = {"processes": processes, "pack_tokens": 64, **rank}
    changes: dict[str, Any] = {
        "rank": LEARNER.rank.model_copy(update=own),
        "algorithm": distilling(divergence="jsd", top_k=K),
        "lora": LoraConfig(rank=4) if adapters else None,
    }
    name = f"ranks-{processes}"
    config = LEARNER.model_copy(update=changes)
    ranks = LocalRanks(name, policy_config(model), config, folder / f"{name}.log", folder)
    found: list[list[float]] = []
    try:
        await ranks.start_ranks(None)
        for step in range(1, STEPS + 1):
            metrics = (await ranks.train_step(teach(make_batch(step=step), top_k=K))).metrics
            names = ("policy/loss", "teacher/divergence", "teacher/reverse_kl")
            found.append([metrics[each] for each in names])
    finally:
        await ranks.close()
    return found


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("shard", "adapters"), [(False, False), (True, False), (False, True), (True, True)]
)
async def test_two_distil_as_one_does(
    model_folder: Path, tmp_path: Path, *, shard: bool, adapters: bool
) -> None:
    one = await distil(model_folder, tmp_path, 1, adapters=adapters)
    two = await distil(model_folder, tmp_path, 2, adapters=adapters, shard=shard)
    for expected, found in zip(one, two, strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
    assert one[0] != one[-1]
