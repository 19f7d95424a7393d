"""Ranks and engines that do not fit into a GPU, and runs that do not fit into a machine."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from flotilla_launcher.doctor.findings import Status
from flotilla_launcher.doctor.memory import check_engine_gpu, check_shared_gpu, check_trainer_gpu
from flotilla_launcher.doctor.memory_estimate import (
    GIB,
    EngineMemory,
    MemoryNeeds,
    estimate_engine,
)
from flotilla_rollout.config.rollout import EngineConfig
from tests.launcher.doctor.test_memory_estimate import POLICY, QWEN3_8B, trainer
from tests.support.doctor import check, probed, spec, subject

H100, H200 = 80 * GIB, 141 * GIB


def engine(**options: object) -> EngineMemory:
    chosen = EngineConfig.model_validate({"device": "cuda", "max_num_seqs": 4, **options})
    lengths = {"max_input_length": POLICY.max_model_len, "max_generate_length": 1}
    return estimate_engine(QWEN3_8B, POLICY, {**lengths, "engine": chosen.model_dump()})


def test_a_rank_that_does_not_fit_has_its_settings_named_that_take_less() -> None:
    given = trainer(processes=4)
    assert given.device > H100
    assert trainer(processes=4, shard=True).device <= H100
    (finding,) = check_trainer_gpu(given, H100, "it")
    assert finding.status is Status.FAIL
    settings = ("shard", "offload_optimizer", "offload_activations")
    named = ", ".join(f"learner.rank.{setting} = true" for setting in settings)
    assert f"; set {named}, split over more learner.rank.processes" in finding.detail
    (alone,) = check_trainer_gpu(trainer(gradient_checkpointing="off"), H100, "it")
    assert "shard" not in alone.detail
    assert '; set learner.rank.gradient_checkpointing = "full", ' in alone.detail


def test_a_long_context_has_its_activations_offloaded() -> None:
    given, moved = (
        trainer(
            max_len=65_536, processes=8, shard=True, head_chunk=256, offload_activations=offload
        )
        for offload in (False, True)
    )
    # The activations that all layers keep move from the GPU to host memory.
    inputs = 65_536 * 2 * QWEN3_8B.layers * QWEN3_8B.hidden
    assert given.device - moved.device == inputs
    assert moved.host - given.host == 8 * inputs


def test_an_engine_without_room_for_a_sequence_is_to_be_spread_or_to_have_a_shorter_context() -> (
    None
):
    (finding,) = check_engine_gpu(engine(), 16 * GIB, "it")
    assert finding.status is Status.FAIL
    assert "raise rollout.engine.tensor_parallel" in finding.detail
    assert "lower policy.max_model_len, or take" in finding.detail
    assert not list(check_engine_gpu(engine(tensor_parallel=2), 16 * GIB, "it"))


@pytest.mark.parametrize(("share", "refused"), [(0.3, False), (0.9, True)])
def test_a_rank_beside_an_engine_has_what_the_engine_leaves(share: float, refused: bool) -> None:
    given = trainer(offload_optimizer=True)
    shared = MemoryNeeds(0, given, engine(gpu_memory_utilization=share), 0)
    assert not list(check_trainer_gpu(given, H200, "it"))
    found = list(check_shared_gpu(shared, H200, "it"))
    assert [finding.status for finding in found] == [Status.FAIL] * refused
    assert all("gpu_memory_utilization = 0.9" in finding.detail for finding in found)


def larger(policy: Path, folder: Path, parameters: float) -> Path:
    """The same policy, with a larger size in its index."""
    shutil.copytree(policy, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    index = {"metadata": {"total_parameters": int(parameters)}, "weight_map": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


async def test_a_policy_too_large_for_memory_disk_and_shared_memory_is_refused(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    # 16 bytes a parameter to train: ten times this machine's memory.
    parameters = psutil.virtual_memory().total * 10 / 16
    parameters = max(
        parameters, shutil.disk_usage(tmp_path).total, shutil.disk_usage("/dev/shm").total
    )
    about = subject(spec(larger(policy, tmp_path / "large", parameters), tasks), tmp_path)
    check(
        await probed("memory", about),
        Status.FAIL,
        "the run takes",
        "this machine has",
        "smaller policy",
    )
    disk = await probed("disk", about)
    check(disk, Status.FAIL, "are free for", "lower learner.checkpoint.keep")
    check(disk, Status.FAIL, "weights in /dev/shm take", "mount -o remount,size=")


async def test_a_run_that_imitates_and_plays_nothing_needs_what_its_learner_takes(
    policy: Path, tmp_path: Path
) -> None:
    given = spec(policy, tmp_path / "none.json")
    learner = {"objective": "sft", "steps": 1, "sft": {"data": "d.npz", "sequences_per_step": 1}}
    about = subject({**given, "learner": learner}, tmp_path)
    found = await probed("memory", about)
    check(found, Status.OK, "B parameters; learner")
    assert "rollout" not in str(found)
    check(await probed("disk", about), Status.OK, "checkpoints take", "weights in /dev/shm 0.0 MiB")
    check(await probed("tokenizer", about), Status.OK, "digest")
    check(await probed("dialect", about), Status.SKIPPED, "the run plays no episode")


async def test_a_gpu_that_is_not_there_is_named(
    policy: Path, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    content = spec(policy, tasks, "learner.rank.device=cuda")
    check(
        await probed("memory", subject(content, tmp_path)),
        *(Status.FAIL, "learner.rank.device require a GPU, and there is none here"),
    )


def rented(policy: Path, tasks: Path, tmp_path: Path, learner: str, rollout: str) -> Any:
    """8 billion parameters in bfloat16, on rented machines of these kinds."""
    large = larger(policy, tmp_path / f"{learner}-{rollout}".replace(":", "-"), 8.2e9)
    content = spec(large, tasks, "policy.dtype=bfloat16", "launcher.backend=sky")
    content["learner"]["rank"] = {"device": "cuda"}
    content["rollout"]["engine"]["device"] = "cuda"
    kinds = {"learner": learner, "rollout": rollout}
    content["launcher"]["sky"] = {
        service: {"any_of": [{"infra": "lambda", "accelerators": kind}]}
        for service, kind in kinds.items()
    }
    return subject(content, tmp_path)


async def test_candidates_whose_gpus_are_too_small_are_named_with_both_figures(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    small = await probed("memory", rented(policy, tasks, tmp_path, "H100:1", "T4:1"))
    check(small, Status.FAIL, "learner: lambda H100:1 has 80.0 GiB for the learner's 122")
    check(
        small,
        Status.FAIL,
        "rollout: lambda T4:1 (16.0 GiB) leaves nothing for KV",
        "tensor_parallel",
    )
    check(await probed("memory", rented(policy, tasks, tmp_path, "H200:1", "L4:1")), Status.OK)


async def test_a_machine_whose_memory_the_catalog_knows_to_be_too_little_is_named(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    about = rented(policy, tasks, tmp_path, "H200:1", "L4:1")
    offloaded = {**about.plan.tables["learner"]["rank"], "offload_optimizer": True}
    about.plan.tables["learner"]["rank"] = offloaded
    check(await probed("memory", about), Status.OK)
    catalog = tmp_path / ".sky/catalogs/v8/lambda"
    catalog.mkdir(parents=True)
    header = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region"
    rows = ("small,H200,1.0,8.0,64.0,3.5,here", "large,H200,1.0,8.0,512.0,4.5,here")
    (catalog / "vms.csv").write_text("\n".join([header, *rows, ""]))
    here = replace(about, environ={**about.environ, "HOME": str(tmp_path)})
    message = await probed("memory", here)
    check(
        message, Status.FAIL, "learner: lambda H200:1 has 64.0 GiB of memory for", "larger machine"
    )
