"""Estimates for models of published sizes."""

from typing import Any

import pytest

from services.launcher.doctor.memory_estimate import GIB, estimate_trainer
from services.launcher.doctor.model_size import ModelSize
from services.learner.config.algorithm import AlgorithmConfig
from services.learner.config.rank import RankConfig

QWEN3_8B = ModelSize(8_190_735_360, 36, 4096, 12_288, 151_936, 8, 128, 40_960)


def gib_of_a_gpu(**rank: object) -> float:
    chosen = RankConfig.model_validate({"device": "cuda", "gradient_checkpointing": "full", **rank})
    section: dict[str, Any] = {
        "rank": chosen.model_dump(),
        "algorithm": AlgorithmConfig().model_dump(),
    }
    return estimate_trainer(QWEN3_8B, "bfloat16", 16_384, section).device / GIB


def test_a_model_that_no_gpu_of_80_gb_holds_is_split_over_four_of_them() -> None:
    assert gib_of_a_gpu(processes=4) > 120
    assert 32 < gib_of_a_gpu(processes=4, shard=True) < 65


def test_parts_in_host_memory_leave_a_gpu_what_is_whole_at_once() -> None:
    kept, moved = (
        gib_of_a_gpu(processes=4, shard=True, offload_optimizer=offload)
        for offload in (False, True)
    )
    assert kept - moved == pytest.approx(16 * QWEN3_8B.parameters / 4 / GIB)


@pytest.mark.parametrize("shard", [False, True])
def test_a_rank_alone_holds_all(shard: bool) -> None:
    assert gib_of_a_gpu(shard=shard) == gib_of_a_gpu()


def test_what_is_whole_during_a_pass_stays_however_many_ranks_there_are() -> None:
    # Embedding and head in bfloat16, and their gradients, which are summed in float32.
    ends = 8 * 2 * QWEN3_8B.vocab * QWEN3_8B.hidden / GIB
    assert ends < gib_of_a_gpu(processes=1024, shard=True) < 3 * ends
