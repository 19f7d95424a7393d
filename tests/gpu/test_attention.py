"""Attention of all segments by one call of the kernel, on a GPU: as one by one."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flotilla_learner.algo.packing import PackLayout, make_pack_layout
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank import attention
from flotilla_learner.rank.flash_attention import attend_at_once, runs_on_flash
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.segment_places import SegmentPlaces, place_segments
from flotilla_learner.rank.trainer import Trainer
from tests.support.rank_configs import policy_config
from tests.support.tiny_ranks import make_prompted_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

CUDA = torch.device("cuda")
# Lengths and parents; segments of one token, of several blocks, and one without tokens.
PACKS: list[tuple[list[int], list[int | None]]] = [
    ([300], [None]),
    ([1, 1, 1], [None] * 3),
    ([129, 1, 0, 700, 64], [None] * 5),
    ([300, 40, 1, 513], [None, 0, 0, 0]),
    ([90, 600, 130, 7, 33, 250, 1, 80], [None, None, 1, 1, None, None, 5, 5]),
]


def projections(layout: PackLayout, heads: int, shared: int, size: int) -> list[Tensor]:
    generator = torch.Generator(CUDA).manual_seed(0)
    tokens = layout.offsets[-1]
    drawn = [
        torch.randn(1, tokens, count, size, generator=generator, device=CUDA)
        for count in (heads, heads // shared, heads // shared)
    ]
    return [each.transpose(1, 2) for each in drawn]


def attend(
    inputs: list[Tensor], dtype: torch.dtype, places: SegmentPlaces, window: int | None
) -> list[Tensor]:
    """Return the answer and the gradients of query, key and value, in float32."""
    given = [each.to(dtype).requires_grad_() for each in inputs]
    function: Any = attention._segment_attention  # pyright: ignore[reportPrivateUsage]
    answer, _ = function(None, *given, None, segment_places=places, sliding_window=window)
    weights = torch.linspace(-1, 1, answer.numel(), device=CUDA).view(answer.shape)
    grads = torch.autograd.grad(answer, given, weights.to(dtype))
    return [each.detach().float() for each in (answer, *grads)]


@pytest.mark.parametrize("window", [None, 1, 100, 400])
@pytest.mark.parametrize(("shared", "size"), [(1, 64), (2, 128), (4, 256), (2, 8)])
@pytest.mark.parametrize("pack", range(len(PACKS)))
def test_all_segments_at_once_are_what_they_are_one_by_one(
    pack: int, shared: int, size: int, window: int | None
) -> None:
    lengths, parents = PACKS[pack]
    layout = make_pack_layout(lengths, parents)
    inputs = projections(layout, 8, shared, size)
    places = place_segments(layout, CUDA, window)
    assert places.kernel is not None
    assert places.kernel.serves(window)
    assert runs_on_flash(*(each.bfloat16() for each in inputs))
    alone = SegmentPlaces(layout.offsets, layout.parents)
    exact = attend(inputs, torch.float32, alone, window)
    rough = attend(inputs, torch.bfloat16, alone, window)
    found = attend(inputs, torch.bfloat16, places, window)
    for ours, theirs, expected in zip(found, rough, exact, strict=True):
        # As near to float32 as what it stands for, but for an answer that was rounded once more.
        allowed = 2 * (theirs - expected).abs().max() + 0.01 * expected.abs().max()
        assert (ours - expected).abs().max() <= allowed


def test_the_host_waits_for_nothing() -> None:
    layout = make_pack_layout([90, 600, 130, 7, 33], [None, None, 1, 1, None])
    inputs = projections(layout, 8, 2, 64)
    try:
        with warnings.catch_warnings(action="ignore"):  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        for window in (None, 100):
            attend(inputs, torch.bfloat16, place_segments(layout, CUDA, window), window)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_float32_is_attended_one_by_one() -> None:
    layout = make_pack_layout([60, 30, 20], [None, 0, 0])
    inputs = projections(layout, 8, 2, 64)
    assert not runs_on_flash(inputs[0], inputs[1], inputs[2])
    places = place_segments(layout, CUDA, None)
    alone = SegmentPlaces(layout.offsets, layout.parents)
    for ours, theirs in zip(
        attend(inputs, torch.float32, places, None),
        attend(inputs, torch.float32, alone, None),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def step(folder: Path, dtype: str, **rank: object) -> Mapping[str, float]:
    """Return the metrics of a step on prompts that several sequences begin with."""
    config = RankConfig.model_validate({"pack_tokens": 256, "head_chunk": 16, **rank})
    policy = load_policy(policy_config(folder, dtype=dtype), config)
    adamw = Optimizer(policy.named_parameters(), OptimizerConfig())
    trainer = Trainer(policy, adamw, AlgorithmConfig(), config)
    return trainer.train_step(make_prompted_batch(), lr=1e-3).metrics


@pytest.mark.parametrize("checkpointing", ["off", "selective", "full"])
def test_a_step_is_near_that_of_the_cpu(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: str
) -> None:
    exact = step(model_folder, "float32")
    taken: list[int] = []

    def attend_and_count(*given: Any) -> Tensor:
        taken.append(1)
        return attend_at_once(*given)

    monkeypatch.setattr(attention, "attend_at_once", attend_and_count)
    chosen = {"device": "cuda", "gradient_checkpointing": checkpointing}
    rough = step(model_folder, "bfloat16", **chosen)
    assert taken
    assert rough["policy/shared_prompt_share"] == exact["policy/shared_prompt_share"] > 0
    assert rough["policy/grad_norm"] == pytest.approx(exact["policy/grad_norm"], rel=0.1)
