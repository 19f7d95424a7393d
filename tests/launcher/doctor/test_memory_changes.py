"""Changes that the doctor proposes: each makes the run fit, and no smaller one does."""

from typing import Any

import pytest

from services.launcher.doctor.findings import Status
from services.launcher.doctor.gpu_room import check_shared_gpu, check_trainer_gpu
from services.launcher.doctor.memory_changes import suggest_for_engine, suggest_for_trainer
from services.launcher.doctor.memory_estimate import GIB
from services.launcher.doctor.memory_needs import MemoryNeeds
from services.learner.config.algorithm import AlgorithmConfig
from services.learner.config.rank import RankConfig
from services.rollout.config.rollout import EngineConfig
from tests.launcher.doctor.test_memory_estimate import QWEN3_8B

H100, H200 = 80 * GIB, 141 * GIB
EVERY_SETTING: dict[str, object] = {
    "gradient_checkpointing": "full",
    "head_chunk": 256,
    "offload_optimizer": True,
    "offload_activations": True,
}


def needs(max_len: int = 16_384, **rank: object) -> MemoryNeeds:
    section = {"device": "cuda", **rank}
    chosen = RankConfig.model_validate(section).model_dump()
    learner = {"rank": chosen, "algorithm": AlgorithmConfig().model_dump()}
    lengths = {"max_input_length": max_len, "max_generate_length": 1}
    engine = {"device": "cuda", "max_num_seqs": 4}
    rollout = {**lengths, "engine": EngineConfig.model_validate(engine).model_dump()}
    return MemoryNeeds(QWEN3_8B, "bfloat16", max_len, learner, rollout)


def test_a_setting_that_costs_no_gpu_comes_first() -> None:
    given = needs(processes=4, gradient_checkpointing="full")
    assert suggest_for_trainer(given, H100) == "set learner.rank.shard = true"
    assert given.with_rank(shard=True).trainer.device <= H100
    alone = needs(gradient_checkpointing="full")
    assert suggest_for_trainer(alone, H100) == "set learner.rank.offload_optimizer = true"
    assert alone.with_rank(offload_optimizer=True).trainer.device <= H100


def test_two_settings_are_named_where_one_is_not_enough() -> None:
    given = needs(processes=4, gradient_checkpointing="off")
    message = suggest_for_trainer(given, H100)
    assert (
        message == 'set learner.rank.shard = true and learner.rank.gradient_checkpointing = "full"'
    )
    assert given.with_rank(shard=True).trainer.device > H100
    assert given.with_rank(gradient_checkpointing="full").trainer.device > H100


def test_a_long_context_has_its_activations_offloaded() -> None:
    settings: dict[str, object] = {"processes": 8, "shard": True, "head_chunk": 256}
    given = needs(65_536, gradient_checkpointing="full", **settings)
    moved = given.with_rank(offload_activations=True)
    # The activations that all layers keep move from the GPU to host memory.
    inputs = 65_536 * 2 * QWEN3_8B.layers * QWEN3_8B.hidden
    assert given.trainer.device - moved.trainer.device == inputs
    assert moved.trainer.host - given.trainer.host == 8 * inputs
    assert (
        suggest_for_trainer(given, moved.trainer.device)
        == "set learner.rank.offload_activations = true"
    )
    auto = needs(65_536, **settings)
    assert suggest_for_trainer(auto, moved.trainer.device) == (
        'set learner.rank.gradient_checkpointing = "full" and'
        " learner.rank.offload_activations = true"
    )


def test_the_fewest_ranks_are_named_where_no_setting_is_enough() -> None:
    given = needs(131_072, **EVERY_SETTING)
    message = suggest_for_trainer(given, H100)
    assert message == (
        "set learner.rank.processes = 2 and learner.rank.shard = true, on as many GPUs"
    )
    assert given.with_rank(processes=2).trainer.device > H100
    assert given.with_rank(processes=2, shard=True).trainer.device <= H100


def test_a_shorter_context_is_named_where_no_number_of_ranks_is_enough() -> None:
    given = needs(524_288, processes=8, shard=True, **EVERY_SETTING)
    message = suggest_for_trainer(given, H100)
    assert message.startswith("set policy.max_model_len = ")
    length = int(message.split()[3])
    assert length % 1024 == 0
    assert needs(length, **_rank(given, length)).trainer.device <= H100
    assert needs(length + 1024, **_rank(given, length)).trainer.device > H100


def _rank(given: MemoryNeeds, length: int) -> dict[str, Any]:
    return {**given.learner["rank"], "pack_tokens": length}


def test_a_gpu_is_named_that_holds_what_no_change_makes_smaller() -> None:
    given = needs(1024, processes=1024, shard=True, gradient_checkpointing="full", head_chunk=256)
    message = suggest_for_trainer(given, GIB)
    assert message.startswith("take GPUs of ")


def test_an_engine_is_spread_before_its_context_is_cut() -> None:
    assert suggest_for_engine(needs(), 16 * GIB) == "set rollout.engine.tensor_parallel = 2"
    assert suggest_for_engine(needs(), GIB // 4).startswith("lower policy.max_model_len, or take")


@pytest.mark.parametrize(("share", "refused"), [(0.3, False), (0.9, True)])
def test_a_rank_beside_an_engine_has_what_the_engine_leaves(share: float, refused: bool) -> None:
    given = needs(gradient_checkpointing="full", offload_optimizer=True)
    shared = given.with_engine(gpu_memory_utilization=share)
    assert not list(check_trainer_gpu(shared, H200, "it"))
    found = list(check_shared_gpu(shared, H200, "it"))
    assert [finding.status for finding in found] == [Status.FAIL] * refused
    assert all("gpu_memory_utilization = 0.9" in finding.detail for finding in found)
