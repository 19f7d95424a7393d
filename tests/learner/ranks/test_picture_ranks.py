"""Ranks train on pictures as one rank does, also if only some of them have any."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flotilla_common.domain.policy import PolicyId
from flotilla_common.images.vision_family import VisionFamily
from flotilla_common.spec.spec import VisionConfig
from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.guard.probes import EngineReport, build_evidence
from flotilla_learner.ports import RankError
from flotilla_learner.ranks.local_ranks import LocalRanks
from flotilla_learner.types import ModelInfo, Publication, StepResult, TrainBatch
from tests.learner.ranks.test_sharded_ranks import TOLERANCE, assert_same, configured
from tests.support.checkpoints import save_ranks, weights_of
from tests.support.picture_batches import family_of, picture_batch
from tests.support.rank_configs import policy_config
from tests.support.vision_models import load_vision_model

FROZEN = VisionConfig()
TRAINED = VisionConfig(tower="trained", projector="trained")
PROJECTED = VisionConfig(projector="trained")
KL: dict[str, object] = {"proximal": "trainer", "kl": {"coefficient": 0.05}}
Folders = Callable[[str], Path]


@asynccontextmanager
async def started(
    model: Path,
    folder: Path,
    processes: int,
    vision: VisionConfig,
    *,
    checkpoint: Path | None = None,
    lora: LoraConfig | None = None,
    **rank: Any,
) -> AsyncGenerator[tuple[LocalRanks, ModelInfo]]:
    base = configured(processes, pack_tokens=256, **rank)
    chosen = base.algorithm.model_validate(KL)
    config = base.model_copy(update={"algorithm": chosen, "lora": lora})
    policy = policy_config(model, vision=vision, max_model_len=256)
    name = f"pictures-{processes}"
    ranks = LocalRanks(name, policy, config, folder / f"{name}.log", folder)
    try:
        yield ranks, await ranks.start_ranks(checkpoint)
    finally:
        await ranks.close()


def one_sees(family: VisionFamily, step: int) -> TrainBatch:
    """Two attempts, one for each of two ranks, of which one sees pictures."""
    sees = picture_batch(family, step=step, groups=1, size=1)
    blind = picture_batch(family, step=step, groups=1, size=1, blind=[0]).sequences[0]
    return replace(sees, sequences=(*sees.sequences, replace(blind, attempt_index=1, reward=-1.0)))


async def make_steps(
    ranks: LocalRanks, family: VisionFamily
) -> tuple[list[StepResult], Publication, dict[str, np.ndarray]]:
    batches = [one_sees(family, 1), picture_batch(family, step=2, groups=3, blind=[1])]
    results = [await ranks.train_step(batch) for batch in batches]
    publication = await ranks.publish_weights(2)
    return results, publication, weights_of(publication)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("kind", "shard", "vision"),
    [
        ("qwen3_vl", True, TRAINED),
        ("qwen2_5_vl", True, FROZEN),
        pytest.param("qwen3_vl", False, TRAINED, marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", True, PROJECTED, marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", True, TRAINED, marks=pytest.mark.slow),
    ],
    ids=["split", "split-frozen", "whole", "split-projector", "split-windows"],
)
async def test_two_make_the_steps_of_one_though_one_of_them_sees_nothing(
    kind: str, shard: bool, vision: VisionConfig, vision_folder: Folders, tmp_path: Path
) -> None:
    folder = vision_folder(kind)
    family = family_of(folder)
    found: list[tuple[list[StepResult], Publication, dict[str, np.ndarray]]] = []
    for count in (1, 2):
        async with started(folder, tmp_path, count, vision, shard=shard) as (ranks, info):
            assert info.banned_ids == family.banned_ids
            found.append(await make_steps(ranks, family))
    (alone, published, weights), (several, others, shared) = found
    for one, other in zip(alone, several, strict=True):
        for name in ("policy/loss", "policy/grad_norm", "policy/post_update_kl"):
            expected = pytest.approx(one.metrics[name], rel=TOLERANCE, abs=TOLERANCE)
            assert other.metrics[name] == expected, name
    assert_same(weights, shared)
    base = dict(load_vision_model(folder).named_parameters())
    moved = {name for name in weights if not np.array_equal(weights[name], base[name].detach())}
    assert any(".visual." in name for name in weights)
    assert any(".visual." in name for name in moved) is vision.is_trained
    assert others.canary_pictures == published.canary_pictures
    assert len(published.canary_pictures) == 1
    np.testing.assert_allclose(
        others.canary_logprobs, published.canary_logprobs, rtol=TOLERANCE, atol=0
    )


@pytest.mark.usefixtures("forked_ranks")
async def test_a_canary_with_its_picture_is_compared_and_a_checkpoint_continued(
    vision_folder: Folders, tmp_path: Path
) -> None:
    folder = vision_folder("qwen3_vl")
    family = family_of(folder)
    async with started(folder, tmp_path, 2, TRAINED) as (ranks, _):
        await make_steps(ranks, family)
        publication = await ranks.publish_weights(2)
        report = EngineReport("w", PolicyId(2, 2), publication.canary_logprobs, ())
        what, evidence = build_evidence(report, publication, ())
        assert what == "canary" and evidence.pictures
        compared = await ranks.compare_batch(evidence, diagnose=True)
        assert compared.versions[2].abs_diff_max < 1e-5
        off = replace(report, canary=publication.canary_logprobs - np.float32(0.25))
        found = await ranks.compare_batch(build_evidence(off, publication, ())[1], diagnose=False)
        assert found.versions[2].abs_diff == pytest.approx(0.25, abs=1e-4)
        saved = await save_ranks(ranks, tmp_path / "checkpoint")
        expected = await ranks.train_step(picture_batch(family, step=3))
    async with started(folder, tmp_path, 1, TRAINED, checkpoint=saved.directory) as (ranks, _):
        again = await ranks.train_step(picture_batch(family, step=3))
    loss = expected.metrics["policy/loss"]
    assert again.metrics["policy/loss"] == pytest.approx(loss, abs=TOLERANCE)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    "shard", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["split", "whole"]
)
async def test_samples_of_an_older_tower_are_compared_under_it(
    shard: bool, vision_folder: Folders, tmp_path: Path
) -> None:
    folder = vision_folder("qwen2_5_vl")
    family = family_of(folder)
    async with started(folder, tmp_path, 2, TRAINED, shard=shard) as (ranks, _):
        before = await ranks.publish_weights(0)
        await ranks.train_step(picture_batch(family))
        after = await ranks.publish_weights(1)
        moved = np.abs(after.canary_logprobs - before.canary_logprobs)
        assert moved.max() > 1e-3
        report = EngineReport("w", PolicyId(1, 1), before.canary_logprobs, ())
        _, evidence = build_evidence(report, before, ())
        stale = replace(evidence.sequences[0], staleness=1)
        both = replace(evidence, sequences=(stale, *evidence.sequences))
        found = await ranks.compare_batch(both, diagnose=True)
    assert found.versions[0].abs_diff_max < 1e-5
    assert found.versions[1].abs_diff_max == pytest.approx(moved.max(), abs=1e-5)
    # It is named as the cause.
    best = min(found.hypotheses, key=lambda each: each.residual)
    assert best.setting == "weights" and best.residual < 1e-5


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
async def test_adapters_of_a_split_base_train_on_pictures(
    vision_folder: Folders, tmp_path: Path
) -> None:
    folder = vision_folder("qwen2_5_vl")
    family, found = family_of(folder), list[tuple[list[StepResult], dict[str, np.ndarray]]]()
    for count in (1, 2):
        lora = LoraConfig(rank=4, alpha=8)
        async with started(folder, tmp_path, count, FROZEN, lora=lora) as (ranks, _):
            results, _, weights = await make_steps(ranks, family)
            found.append((results, weights))
    (alone, one), (several, two) = found
    assert_same(one, two)
    for ours, theirs in zip(several, alone, strict=True):
        loss = theirs.metrics["policy/loss"]
        assert ours.metrics["policy/loss"] == pytest.approx(loss, abs=TOLERANCE)


@pytest.mark.usefixtures("forked_ranks")
async def test_a_batch_of_an_engine_that_samples_marks_of_pictures_is_refused(
    vision_folder: Folders, tmp_path: Path
) -> None:
    folder = vision_folder("qwen3_vl")
    family = family_of(folder)
    batch = picture_batch(family)
    first = batch.sequences[0]
    ids = first.token_ids.copy()
    ids[np.flatnonzero(first.policy_mask)[-1]] = family.vision_start
    broken = replace(batch, sequences=(replace(first, token_ids=ids), *batch.sequences[1:]))
    async with started(folder, tmp_path, 1, FROZEN) as (ranks, _):
        with pytest.raises(RankError, match=f"the policy wrote token {family.vision_start}"):
            await ranks.train_step(broken)
