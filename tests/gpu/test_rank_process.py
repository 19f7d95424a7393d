"""The real rank process on a GPU, and models split by FSDP2 there: the steps of a CPU's rank."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch.distributed.fsdp import FSDPModule

from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.rank import rank_setup
from flotilla_learner.rank.rank_setup import RankSetup, load_models
from flotilla_learner.rank.sharding import gather_tensor
from flotilla_learner.ranks.local_ranks import LocalRanks
from flotilla_learner.types import Publication, StepResult
from tests.support.checkpoints import save_ranks, weights_of
from tests.support.lone_ranks import join_ranks, start_alone
from tests.support.rank_configs import EVERYTHING, LEARNER, policy_config
from tests.support.tiny_ranks import make_batch, make_prompted_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

# Adam's first steps are as large as the rate wherever a gradient is next to nothing, and so is the
# difference of its roundings: not with this eps.
OPTIMIZER = {"lr": 1e-3, "eps": 1e-4}

each_way = pytest.mark.parametrize(
    "rank",
    [
        {},
        {"gradient_checkpointing": "full", "offload_activations": True},
        {"offload_optimizer": True, "gradient_checkpointing": "selective"},
        {"compile": True},
    ],
    ids=["plain", "offloaded activations", "offloaded moments", "compiled"],
)


def configured(device: str, **rank: object) -> LearnerConfig:
    """Return the configuration of all losses, for ranks with these settings."""
    given = LEARNER.model_dump()
    given["algorithm"] = EVERYTHING
    given["optimizer"] = {**given["optimizer"], **OPTIMIZER}
    given["rank"] = {**given["rank"], "device": device, **rank}
    return LearnerConfig.model_validate(given)


@asynccontextmanager
async def started(
    name: str, model: Path, folder: Path, config: LearnerConfig, checkpoint: Path | None = None
) -> AsyncGenerator[LocalRanks]:
    ranks = LocalRanks(name, policy_config(model), config, folder / f"{name}.log", folder)
    try:
        await ranks.start_ranks(checkpoint)
        yield ranks
    finally:
        await ranks.close()


@dataclass(frozen=True, slots=True)
class TrainedSteps:
    """Two steps, the second by a process that resumed from the checkpoint of the first."""

    results: list[StepResult]
    publication: Publication
    weights: dict[str, np.ndarray]


async def train_and_resume(model: Path, folder: Path, config: LearnerConfig) -> TrainedSteps:
    name = config.rank.device
    async with started(f"{name}-1", model, folder, config) as ranks:
        results = [await ranks.train_step(make_prompted_batch(step=1))]
        files = await save_ranks(ranks, folder / f"{name}-checkpoint")
    async with started(f"{name}-2", model, folder, config, files.directory) as ranks:
        results.append(await ranks.train_step(make_batch(step=2)))
        publication = await ranks.publish_weights(2)
        weights = weights_of(publication)
    return TrainedSteps(results, publication, weights)


def assert_near(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=0, atol=1e-4, err_msg=name)


@each_way
async def test_a_process_and_one_that_resumes_make_the_steps_of_a_cpu(
    model_folder: Path, tmp_path: Path, rank: dict[str, object]
) -> None:
    theirs = await train_and_resume(model_folder, tmp_path, configured("cpu"))
    with capture_logs() as logs:
        ours = await train_and_resume(model_folder, tmp_path, configured("cuda", **rank))
    passed = [line for line in logs if line["event"] == "burn-in passed"]
    assert len(passed) == 2
    assert all(0 < peak < 8 for line in passed for peak in line["gpu_peak_gib"])
    for one, other in zip(ours.results, theirs.results, strict=True):
        for name in ("policy/loss", "policy/grad_norm", "policy/post_update_kl"):
            assert one.metrics[name] == pytest.approx(other.metrics[name], rel=1e-3, abs=1e-5), name
    assert_near(ours.weights, theirs.weights)
    np.testing.assert_allclose(
        ours.publication.canary_logprobs, theirs.publication.canary_logprobs, rtol=0, atol=1e-3
    )


def train_split_model(setup: dict[str, Any], reported: Connection) -> None:
    """A rank whose model FSDP2 splits over a group of one process, over NCCL on a GPU."""
    rank_setup._make_layout = join_ranks  # pyright: ignore[reportPrivateUsage]
    models = load_models(RankSetup.model_validate(setup))
    batches = make_prompted_batch(step=1), make_batch(step=2)
    metrics = [dict(models.trainer.train_step(batch, 1e-3).metrics) for batch in batches]
    found = models.policy.named_parameters().items()
    reported.send(
        (metrics, {name: gather_tensor(value).detach().cpu().numpy() for name, value in found})
    )
    torch.distributed.destroy_process_group()


def train_split(model: Path, folder: Path, config: LearnerConfig, dtype: str = "float32") -> Any:
    """Return the metrics of two steps and the whole parameters after them."""
    [found] = start_alone(train_split_model, policy_config(model, dtype=dtype), config, folder)
    return found


needs_unused_parameters = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="needs torch 2.13"
)


@needs_unused_parameters
@each_way
def test_a_split_model_makes_the_steps_of_a_cpu(
    model_folder: Path, tmp_path: Path, rank: dict[str, object]
) -> None:
    expected, theirs = train_split(model_folder, tmp_path / "cpu", configured("cpu"))
    found, ours = train_split(model_folder, tmp_path / "gpu", configured("cuda", **rank))
    for one, other in zip(found, expected, strict=True):
        for name in ("policy/loss", "policy/grad_norm", "policy/post_update_kl"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name
    assert_near(ours, theirs)


@needs_unused_parameters
def test_a_split_model_computes_in_bfloat16(model_folder: Path, tmp_path: Path) -> None:
    exact, _ = train_split(model_folder, tmp_path / "cpu", configured("cpu"))
    rough, _ = train_split(model_folder, tmp_path / "gpu", configured("cuda"), "bfloat16")
    assert rough[0]["policy/grad_norm"] != exact[0]["policy/grad_norm"]
    assert rough[0]["policy/grad_norm"] == pytest.approx(exact[0]["policy/grad_norm"], rel=0.1)
