"""Ranks that each hold a part of the parameters compute what one rank does."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Generator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, Qwen3Config, Qwen3ForCausalLM

from flotilla_common.process.process_memory import peak_memory_bytes
from flotilla_common.tensors.tensor_checksum import checksum64
from flotilla_learner.checkpoints.export import export_model
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.ports import RankError
from flotilla_learner.rank.checkpoint_writer import CheckpointWriter
from flotilla_learner.rank.model_loading import read_split_model
from flotilla_learner.rank.policy_loading import load_split_body
from flotilla_learner.rank.rank_setup import RankSetup, load_models
from flotilla_learner.rank.shard_checksums import ShardChecksums
from flotilla_learner.rank.sharding import gather_tensor, local_tensor
from flotilla_learner.rank.split_loading import MODEL, saved_tensors
from flotilla_learner.ranks.local_ranks import LocalRanks
from flotilla_learner.types import Comparison, Publication, StepResult, TrainBatch
from tests.support.checkpoints import save_ranks, weights_of
from tests.support.lone_ranks import SPAWNED, join_ranks, start_alone
from tests.support.multimodal_models import KINDS, make_multimodal
from tests.support.process_commands import rank_pids
from tests.support.process_forge import ProcessForge
from tests.support.rank_configs import EVERYTHING, LEARNER, policy_config
from tests.support.tiny_ranks import (
    SMALL_SIZES,
    make_batch,
    make_prompted_batch,
    write_model,
    write_sparse_model,
)

STEPS = 2
# Gemma 4 has them as buffers; they begin as 1.
LAYER_SCALARS = {f"model.layers.{index}.layer_scalar": 0.5 + index for index in range(2)}
TOLERANCE = 1e-5

ALGORITHMS: dict[str, dict[str, object]] = {
    "plain": {},
    "values": {"advantage": "gae"},
    "everything": EVERYTHING,
}


def configured(processes: int, algorithm: str = "plain", **changes: object) -> LearnerConfig:
    own = {"processes": processes, "shard": True, "pack_tokens": 128, **changes}
    if processes > 1 and algorithm == "everything":
        own |= {
            "gradient_checkpointing": "full",
            "offload_activations": True,
            "offload_optimizer": True,
        }
    rank = LEARNER.rank.model_copy(update=own)
    # Adam's first steps are as large as the rate wherever a gradient is next to nothing, and so is
    # the difference of its roundings: not with this eps.
    optimizer = LEARNER.optimizer.model_copy(update={"lr": 1e-3, "eps": 1e-4})
    chosen = AlgorithmConfig.model_validate(ALGORITHMS[algorithm])
    return LEARNER.model_copy(update={"rank": rank, "optimizer": optimizer, "algorithm": chosen})


@asynccontextmanager
async def started(
    model: Path,
    folder: Path,
    processes: int,
    checkpoint: Path | None = None,
    algorithm: str = "plain",
    dtype: str = "float32",
    **changes: object,
) -> AsyncGenerator[LocalRanks]:
    name = f"ranks-{processes}"
    config = configured(processes, algorithm, **changes)
    policy = policy_config(model, dtype=dtype)
    ranks = LocalRanks(name, policy, config, folder / f"{name}.log", folder)
    try:
        await ranks.start_ranks(checkpoint)
        yield ranks
    finally:
        await ranks.close()


def tried_settings(comparison: Comparison) -> set[str]:
    return {each.setting for each in comparison.hypotheses}


async def train(ranks: LocalRanks, steps: range) -> list[StepResult]:
    return [await ranks.train_step(batch_of(step)) for step in steps]


def batch_of(step: int) -> TrainBatch:
    # Three groups, each with a prompt that is computed once, make packs that ranks have not as many
    # of; one without makes less than there are ranks at most: some have nothing to compute.
    return make_prompted_batch(step=step) if step % 2 else make_batch(step=step, groups=1)


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    """Raise if weights differ by more than roundings: a step moves them by 1e-3."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, rtol=0, atol=2e-6, err_msg=name)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("kind", "processes", "algorithm"),
    [
        ("tied", 2, "everything"),
        pytest.param("tied", 2, "plain", marks=pytest.mark.slow),
        pytest.param("experts", 2, "plain", marks=pytest.mark.slow),
        pytest.param("qwen3_vl", 2, "everything", marks=pytest.mark.slow),
        # Their files have other names than their class, and one of them another layout.
        pytest.param("mistral3", 2, "everything", marks=pytest.mark.slow),
        pytest.param("untied", 4, "plain", marks=pytest.mark.slow),
        pytest.param("tied", 4, "everything", marks=pytest.mark.slow),
        pytest.param("untied", 2, "everything", marks=pytest.mark.slow),
        pytest.param("experts", 4, "everything", marks=pytest.mark.slow),
    ],
)
async def test_they_make_the_same_steps_as_one(
    kind: str, processes: int, algorithm: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    if kind == "experts":
        write_sparse_model(model)
    elif kind in KINDS:
        make_multimodal(model, kind)
    else:
        write_model(model, tied=kind == "tied")
    found: list[tuple[list[StepResult], Publication, dict[str, np.ndarray]]] = []
    for count in (1, processes):
        async with started(model, tmp_path, count, algorithm=algorithm) as ranks:
            results = await train(ranks, range(1, STEPS + 1))
            publication = await ranks.publish_weights(STEPS)
            found.append((results, publication, weights_of(publication)))
    (alone, published, weights), (several, others, shared) = found
    for one, other in zip(alone, several, strict=True):
        for name in ("policy/loss", "policy/grad_norm", "policy/post_update_kl"):
            assert other.metrics[name] == pytest.approx(
                one.metrics[name], rel=TOLERANCE, abs=TOLERANCE
            ), name
    # A group that is split over ranks shares less.
    share = [results[0].metrics["policy/shared_prompt_share"] for results in (several, alone)]
    assert (share[0] > 0 or processes > 2) and share[0] <= share[1] and share[1] > 0.25
    assert_same(weights, shared)
    # Of logprobs as low as -10: a model makes the last bits of its weights thirty times as large.
    np.testing.assert_allclose(
        others.canary_logprobs, published.canary_logprobs, rtol=TOLERANCE, atol=0
    )


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("algorithm", "counts"),
    [
        ("plain", (1,)),
        pytest.param("plain", (4,), marks=pytest.mark.slow),
        pytest.param("everything", (4, 1), marks=pytest.mark.slow),
    ],
)
async def test_a_checkpoint_of_two_resumes_with_another_number(
    algorithm: str, counts: tuple[int, ...], tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model")
    async with started(model, tmp_path, 2, algorithm=algorithm) as ranks:
        await train(ranks, range(1, 3))
        files = await save_ranks(ranks, tmp_path / "checkpoint")
        weights = weights_of(await ranks.publish_weights(2))
        expected = await train(ranks, range(3, 5))
    assert len(list(files.directory.glob("*.safetensors"))) == 2
    export_model(files.directory, model, policy_config(model), tmp_path / "exported")
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    assert exported.keys() == weights.keys()
    assert all((exported[name] == weights[name]).all() for name in weights)
    for count in counts:
        async with started(model, tmp_path, count, files.directory, algorithm) as ranks:
            for one, other in zip(expected, await train(ranks, range(3, 5)), strict=True):
                loss = one.metrics["policy/loss"]
                assert other.metrics["policy/loss"] == pytest.approx(loss, abs=TOLERANCE)


def keeping(*, less: bool) -> dict[str, Any]:
    """Return keys of `rank` that keep less on the device, or all of it."""
    checkpointing = "selective" if less else "off"
    return {
        "offload_optimizer": less,
        "offload_reference": less,
        "gradient_checkpointing": checkpointing,
    }


# To a rounding error, `everything` above shows it.
@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("algorithm", ["plain", "everything"])
async def test_those_that_keep_less_on_the_device_make_the_same_steps(
    algorithm: str, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model")
    async with started(model, tmp_path, 2, None, algorithm, **keeping(less=False)) as ranks:
        kept = await train(ranks, range(1, 4))
        published = await ranks.publish_weights(3)
    async with started(model, tmp_path, 2, None, algorithm, **keeping(less=True)) as ranks:
        moved = await train(ranks, range(1, 3))
        files = await save_ranks(ranks, tmp_path / "checkpoint")
    given = files.directory, algorithm
    async with started(model, tmp_path, 2, *given, **keeping(less=True)) as ranks:
        moved += await train(ranks, range(3, 4))
        others = await ranks.publish_weights(3)
    assert [each.metrics for each in moved] == [each.metrics for each in kept]
    assert others.fingerprint == published.fingerprint


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
async def test_they_compute_in_bfloat16_and_sum_gradients_in_float32(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    found: list[StepResult] = []
    for dtype, count in (("float32", 2), ("bfloat16", 1), ("bfloat16", 2)):
        async with started(model, tmp_path, count, None, "everything", dtype) as ranks:
            found += await train(ranks, range(1, 2))
            assert (await ranks.publish_weights(1)).version == 1
    exact, alone, split = [each.metrics for each in found]
    for name in ("policy/loss", "policy/grad_norm"):
        assert split[name] != exact[name]
        assert split[name] == pytest.approx(alone[name], rel=0.03, abs=0.01), name


@pytest.mark.usefixtures("forked_ranks")
async def test_they_compare_engine_and_trainer_as_one_does(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", tied=False)
    compared, losses = list[Comparison](), list[float]()
    for count in (1, 2):
        async with started(model, tmp_path, count) as ranks:
            await ranks.publish_weights(0)
            await train(ranks, range(1, 2))
            await ranks.publish_weights(1)
            batch = batch_of(2)
            stale = [replace(sequence, staleness=1) for sequence in batch.sequences[:2]]
            mixed = TrainBatch(2, (*stale, *batch.sequences[2:]))
            compared.append(await ranks.compare_batch(mixed, diagnose=True))
            # Nothing of it stays in the model.
            losses.append((await train(ranks, range(2, 3)))[0].metrics["policy/loss"])
    one, other = compared
    assert losses[1] == pytest.approx(losses[0], abs=TOLERANCE)
    assert other.sequences == pytest.approx(one.sequences, abs=TOLERANCE)
    assert other.versions.keys() == one.versions.keys() == {0, 1}
    tried = {(each.setting, each.value): each for each in one.hypotheses}
    assert tried_settings(other) == tried_settings(one) - {"dtype"}
    for each in other.hypotheses:
        assert each.residual == pytest.approx(tried[each.setting, each.value].residual, abs=1e-4)


# As without parts: test_local_ranks.py kills one of those.
@pytest.mark.slow
async def test_one_that_is_killed_ends_them_all_within_seconds(tmp_path: Path) -> None:
    async with started(write_model(tmp_path / "model"), tmp_path, 2) as ranks:
        first, second = rank_pids()
        os.kill(second, signal.SIGSTOP)
        publishing = asyncio.create_task(ranks.publish_weights(0))
        await asyncio.sleep(0.2)
        os.kill(second, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RankError, match="training rank 1 was killed by signal 9"):
            await publishing
        assert time.monotonic() - began < 8
    assert not {str(first), str(second)} & set(os.listdir("/proc"))


def hold_a_part(setup: dict[str, Any], reported: Connection) -> None:
    """A rank that makes a step and reports the parameters, gradients and moments it holds."""
    models = load_models(RankSetup.model_validate(setup))
    gradients: list[int] = []
    norm = models.optimizer.gradient_norm

    def measured_norm() -> Tensor:
        gradients.append(held_bytes(models.optimizer.gradients))
        return norm()

    vars(models.optimizer)["gradient_norm"] = measured_norm
    models.trainer.train_step(make_batch(), 1e-3)
    parameters = models.policy.named_parameters().values()
    moments = [value for value in models.optimizer.state_tensors().values() if value.ndim]
    reported.send((held_bytes(parameters), gradients[0], held_bytes(moments)))


def load_a_part(setup: dict[str, Any], reported: Connection) -> None:
    """A rank that reports the peak growth of its memory while it reads its part of a policy, and
    then of a critic's body."""
    given = RankSetup.model_validate(setup)
    layout = join_ranks(given, torch.device("cpu"))
    before = psutil.Process().memory_info().rss
    model = read_split_model(given.policy, layout)
    peak, held = peak_memory_bytes() - before, held_bytes(model.parameters())
    body = load_split_body(given.policy, given.rank, layout)
    reported.send(
        ((peak, held), (peak_memory_bytes() - before, held + held_bytes(body.parameters())))
    )


def save_a_part(setup: dict[str, Any], reported: Connection) -> None:
    """A rank that writes its part of a policy and a critic, with moments, as a checkpoint."""
    given = RankSetup.model_validate(setup)
    models = load_models(given)
    assert models.critic is not None
    for optimizer, parameters in (
        (models.optimizer, models.policy.trained_parameters()),
        (models.critic.optimizer, models.critic.named_parameters()),
    ):
        kinds = ("step", "exp_avg", "exp_avg_sq")
        optimizer.add_empty_state([f"{kind}.{name}" for name in parameters for kind in kinds])
    writer = CheckpointWriter(given.place.index, models.policy.device, models.saved.describe)
    writer.begin_writing(given.shm_dir / "saved", models.state, 1)
    reported.send(sorted(writer.when_written(lambda files: files.sha256).result()))


def resume_a_part(setup: dict[str, Any], reported: Connection) -> None:
    """A rank that reports the peak growth of its memory while it resumes from a checkpoint, and
    its part of that checkpoint."""
    checkpoint = Path(setup["shm_dir"]) / "saved"
    before = psutil.Process().memory_info().rss
    models = load_models(RankSetup.model_validate({**setup, "checkpoint": checkpoint}))
    peak = peak_memory_bytes() - before
    reported.send((peak, sum(held_bytes(tensors.values()) for tensors in models.state.values())))


def read_buffers(setup: dict[str, Any], reported: Connection) -> None:
    """A rank that reads its part of a model, writes it as a checkpoint and reads that; it reports
    its buffers then."""
    given = RankSetup.model_validate(setup)
    layout = join_ranks(given, torch.device("cpu"))
    model = read_split_model(given.policy, layout)
    found = [model.get_buffer(name).tolist() for name in LAYER_SCALARS]

    def describe(folder: Path) -> list[str]:
        model.config.save_pretrained(folder)
        return ["config.json"]

    writer = CheckpointWriter(given.place.index, torch.device("cpu"), describe)
    writer.begin_writing(given.shm_dir / "saved", {MODEL: saved_tensors(model)}, 1)
    writer.when_written(lambda files: files).result()
    torch.distributed.barrier()
    again = read_split_model(given.policy, layout, given.shm_dir / "saved")
    reported.send((found, [again.get_buffer(name).tolist() for name in LAYER_SCALARS]))


def sum_checksums(setup: dict[str, Any], reported: Connection) -> None:
    """A rank that reports the checksums of a split tensor and of one that each rank has whole,
    summed over the ranks and of the whole tensors."""
    given = RankSetup.model_validate(setup)
    layout = join_ranks(given, torch.device("cpu"))
    [split, *_] = read_split_model(given.policy, layout).parameters()
    sums, wholes = ShardChecksums(), (gather_tensor(split), torch.arange(4.0))
    for near, whole in zip((split, wholes[1]), wholes, strict=True):
        sums.add_tensor(near, whole)
    expected = [checksum64(whole.detach().reshape(-1).view(torch.uint8)) for whole in wholes]
    reported.send((isinstance(split, DTensor), sums.sum_parts(), expected))


def held_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local_tensor(tensor).nbytes for tensor in tensors)


@pytest.fixture
def spawned_by_forks(rank_forge: ProcessForge) -> Generator[None]:
    """Have `SPAWNED` fork from a process that has loaded torch: for tests without memory bounds."""
    SPAWNED.set_executable(str(rank_forge.interpreter))
    yield
    SPAWNED.set_executable(sys.executable)


@pytest.mark.usefixtures("spawned_by_forks")
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_each_holds_its_part_of_parameters_gradients_and_moments(
    processes: int, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", tied=False)
    whole = sum(value.nbytes for value in load_file(model / "model.safetensors").values())
    found = start_alone(hold_a_part, policy_config(model), configured(processes), tmp_path)
    for parameters, gradients, moments in found:
        for held, copies in ((parameters, 1), (gradients, 1), (moments, 2)):
            assert copies * whole / processes * 0.8 < held <= 1.1 * copies * whole / processes


@pytest.mark.usefixtures("spawned_by_forks")
def test_buffers_with_a_state_are_read_and_saved_by_each(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        **SMALL_SIZES,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "layer_types": ["full_attention"] * 2,
    }
    model = Gemma4ForCausalLM(Gemma4TextConfig(**sizes))
    for name, value in LAYER_SCALARS.items():
        model.get_buffer(name).fill_(value)
    model.save_pretrained(tmp_path / "model")
    expected = [[value] for value in LAYER_SCALARS.values()]
    policy = policy_config(tmp_path / "model")
    for found in start_alone(read_buffers, policy, configured(2), tmp_path / "ranks"):
        assert found == (expected, expected)


@pytest.mark.usefixtures("spawned_by_forks")
def test_what_each_rank_has_whole_counts_once_in_the_checksums(tmp_path: Path) -> None:
    policy = policy_config(write_model(tmp_path / "model", tied=True))
    for found in start_alone(sum_checksums, policy, configured(2), tmp_path / "ranks"):
        is_split, sums, expected = found
        assert is_split
        assert sums == expected


def write_large_model(folder: Path, *, layers: int, vocabulary: int) -> int:
    """Write a model in float32; return how many parameters it has."""
    sizes: dict[str, Any] = {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    config = Qwen3Config(vocab_size=vocabulary, tie_word_embeddings=True, **sizes)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return (folder / "model.safetensors").stat().st_size // 4


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_more_there_are_the_less_memory_does_reading_take(tmp_path: Path) -> None:
    model = tmp_path / "model"
    parameters = write_large_model(model, layers=8, vocabulary=4096)
    assert parameters > 120e6
    for processes in (2, 4):
        folder = tmp_path / str(processes)
        found = start_alone(load_a_part, policy_config(model), configured(processes), folder)
        for models, (peak, held) in (each for rank in found for each in enumerate(rank, 1)):
            assert held == pytest.approx(models * 4 * parameters / processes, rel=0.01)
            # As much as training needs afterwards: mapped pages of the files count.
            assert peak <= 1.1 * 16 * models * parameters / processes


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_none_holds_a_whole_policy_or_critic_as_it_resumes_from_a_checkpoint(
    tmp_path: Path,
) -> None:
    parameters = write_large_model(tmp_path / "model", layers=4, vocabulary=4096)
    policy, config = policy_config(tmp_path / "model"), configured(2, "values")
    files = start_alone(save_a_part, policy, config, tmp_path / "ranks")
    assert not set(files[0]) & set(files[1])
    for peak, held in start_alone(resume_a_part, policy, config, tmp_path / "ranks"):
        assert held == pytest.approx(2 * 12 * parameters / 2, rel=0.01)
        assert peak <= 1.1 * 16 * 2 * parameters / 2
