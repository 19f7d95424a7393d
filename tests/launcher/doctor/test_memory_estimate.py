"""Estimates for models of published sizes."""

from pathlib import Path
from typing import Any

import pytest

from flotilla_common.spec.spec import PolicyConfig
from flotilla_launcher.doctor.disk import checkpoint_bytes
from flotilla_launcher.doctor.memory_estimate import (
    GIB,
    TrainerMemory,
    adapter_parameters,
    estimate_trainer,
    weight_slot_bytes,
)
from flotilla_launcher.doctor.model_size import ModelSize, read_model_size
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.config.rank import RankConfig

QWEN3_8B = ModelSize(8_190_735_360, 36, 4096, 12_288, 151_936, 8, 128, 40_960, 32)
POLICY = PolicyConfig(model="Qwen/Qwen3-8B", max_model_len=16_384)


def learner(lora: LoraConfig | None = None, **rank: object) -> dict[str, Any]:
    chosen = RankConfig.model_validate({"device": "cuda", "gradient_checkpointing": "full", **rank})
    return {
        "rank": chosen.model_dump(),
        "algorithm": AlgorithmConfig().model_dump(),
        "lora": None if lora is None else lora.model_dump(),
        "checkpoint": {"keep": 2},
    }


def trainer(lora: LoraConfig | None = None, max_len: int = 16_384, **rank: object) -> TrainerMemory:
    policy = POLICY.model_copy(update={"max_model_len": max_len})
    return estimate_trainer(QWEN3_8B, policy, learner(lora, **rank))


def gib_of_a_gpu(*, lora: LoraConfig | None = None, **rank: object) -> float:
    return trainer(lora, 16_384, **rank).device / GIB


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


def test_a_model_that_no_gpu_holds_trains_adapters_on_one() -> None:
    lora = LoraConfig(rank=16)
    assert gib_of_a_gpu() > 120
    # The base in bfloat16, 16 bytes for each of 43.6 million parameters, and a pass.
    assert 17 < gib_of_a_gpu(lora=lora) < 40
    assert gib_of_a_gpu(lora=lora, processes=4, shard=True) < gib_of_a_gpu(lora=lora) - 8
    more = gib_of_a_gpu(lora=LoraConfig(rank=32)) - gib_of_a_gpu(lora=lora)
    assert more == pytest.approx(16 * 43_646_976 / GIB)


def test_adapters_that_are_published_alone_take_little_shared_memory() -> None:
    section = learner(LoraConfig(rank=16))
    merged, alone = (
        weight_slot_bytes(QWEN3_8B, POLICY.model_copy(update={"adapter_rank": rank}), section)
        for rank in (None, 16)
    )
    assert merged == 3 * 2 * QWEN3_8B.parameters
    assert alone == 3 * 2 * 43_646_976


def test_checkpoints_of_adapters_are_small() -> None:
    section = learner(LoraConfig(rank=16))
    whole = checkpoint_bytes(QWEN3_8B, POLICY, {**section, "lora": None})
    assert whole > 300e9
    model = 2 * QWEN3_8B.parameters
    assert checkpoint_bytes(QWEN3_8B, POLICY, section) - model < 2e9


@pytest.mark.parametrize("target", ["all-linear", ("q_proj", "mlp.down_proj")])
def test_adapters_are_counted_as_they_are(model_folder: Path, target: Any) -> None:
    from flotilla_learner.rank.policy_loading import load_policy
    from tests.support.rank_configs import policy_config

    lora = LoraConfig(rank=4, target_modules=target)
    policy = load_policy(policy_config(model_folder), RankConfig(), lora=lora)
    counted = adapter_parameters(read_model_size(model_folder), lora.model_dump())
    assert counted == sum(p.numel() for p in policy.trained_parameters().values())
