"""One call of a kernel for all segments gives what they give one by one, gradients too.

The kernel's contract is computed by `tests.support.flash_double`; `tests/gpu` runs the kernel."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flotilla_learner.algo.packing import PackLayout, make_pack_layout
from flotilla_learner.rank import attention, model
from flotilla_learner.rank.segment_places import (
    PrefixRun,
    SegmentPlaces,
    make_kernel_places,
    place_segments,
)
from tests.learner.rank.test_prompt_sharing import check_equal, train
from tests.support.examples import examples
from tests.support.flash_double import BACKWARD, FORWARD, flash_on_cpu

CPU = torch.device("cpu")
# Lengths and parents.
PACKS: Mapping[str, tuple[list[int], list[int | None]]] = {
    "one": ([7], [None]),
    "several": ([5, 1, 9, 3], [None] * 4),
    "prompt": ([6, 4, 1, 5], [None, 0, 0, 0]),
    "prompts": ([3, 6, 4, 5, 2, 7, 1, 3], [None, None, 1, 1, None, None, 5, 5]),
    "empty": ([4, 0, 3, 0, 2, 5], [None, None, 0, 0, 0, 1]),
}


class TakenPath(AssertionError):
    """The kernel was called."""


def projections(layout: PackLayout, heads: int, shared: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = layout.offsets[-1]
    # As models give them: heads before tokens, in the memory of tokens before heads.
    drawn = [
        torch.randn(1, tokens, count, 8, generator=generator, dtype=torch.float64)
        for count in (heads, heads // shared, heads // shared)
    ]
    return [each.transpose(1, 2).requires_grad_() for each in drawn]


def attend(layout: PackLayout, places: SegmentPlaces, shared: int, window: int | None) -> Any:
    """Return the answer and the gradients of query, key and value."""
    inputs = projections(layout, 4, shared)
    function: Any = attention._segment_attention  # pyright: ignore[reportPrivateUsage]
    answer, _ = function(
        None, *inputs, None, scaling=0.3, segment_places=places, sliding_window=window
    )
    weights = torch.linspace(-1, 1, answer.numel(), dtype=answer.dtype).view(answer.shape)
    return answer.detach(), *torch.autograd.grad((answer * weights).sum(), inputs)


def filled_places(lengths: list[int], parents: Sequence[int | None]) -> SegmentPlaces:
    """Places without the empty segments, which CPUs' kernels do not bear."""
    filled = [index for index, length in enumerate(lengths) if length]
    moved = {index: place for place, index in enumerate(filled)}
    layout = make_pack_layout(
        [lengths[index] for index in filled],
        [moved.get(-1 if (parent := parents[index]) is None else parent) for index in filled],
    )
    return SegmentPlaces(layout.offsets, layout.parents)


def check_same(
    lengths: list[int], parents: Sequence[int | None], shared: int, window: int | None
) -> int:
    """Compare both ways; return how often the kernel was called forward."""
    layout = make_pack_layout(lengths, parents)
    alone = attend(layout, filled_places(lengths, parents), shared, window)
    kernel = make_kernel_places(layout, CPU, window)
    places = SegmentPlaces(layout.offsets, layout.parents, kernel)
    with pytest.MonkeyPatch.context() as patch, flash_on_cpu() as counts:
        patch.setattr(attention, "runs_on_flash", lambda *_: True)
        together = attend(layout, places, shared, window)
    assert counts[FORWARD] == counts[BACKWARD]
    for ours, theirs in zip(together, alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    return counts[FORWARD]


@pytest.mark.parametrize("shared", [1, 2, 4])
@pytest.mark.parametrize("pack", list(PACKS))
def test_all_segments_at_once_are_what_they_are_one_by_one(pack: str, shared: int) -> None:
    lengths, parents = PACKS[pack]
    # Once for the segments themselves, once for what they continue.
    continues = any(parent is not None for parent in parents)
    assert check_same(lengths, parents, shared, None) == 1 + continues


@pytest.mark.parametrize("window", [1, 2, 4, 6, 50])
@pytest.mark.parametrize("pack", list(PACKS))
def test_so_are_those_with_a_window(pack: str, window: int) -> None:
    calls = check_same(*PACKS[pack], 2, window)
    assert calls == 1 or window == 50


@settings(deadline=None, max_examples=examples(50))
@given(st.data())
def test_so_are_segments_of_any_lengths(data: st.DataObject) -> None:
    lengths, parents = list[int](), list[int | None]()
    for _ in range(data.draw(st.integers(1, 4))):
        start = len(lengths)
        children = data.draw(st.integers(0, 3))
        lengths += data.draw(st.lists(st.integers(0, 6), min_size=children, max_size=children))
        lengths.insert(start, data.draw(st.integers(1, 8)))
        parents += [None, *[start] * children]
    window = data.draw(st.none() | st.integers(1, 9))
    check_same(lengths, parents, data.draw(st.sampled_from([1, 2])), window)


def test_spans_lie_where_segments_do() -> None:
    layout = make_pack_layout([3, 6, 0, 4, 5, 2], [None, None, 1, 1, 1, None])
    places = make_kernel_places(layout, CPU, 3)
    assert places.own.queries.tolist() == places.own.keys.tolist() == [0, 3, 9, 13, 18, 20]
    assert places.own.most_queries == places.own.most_keys == 6
    assert places.longest == 11
    assert places.prefixes is not None
    assert places.prefixes.runs == (PrefixRun((9, 18), (3, 9)),)
    assert places.prefixes.spans.queries.tolist() == [0, 9]
    assert places.prefixes.spans.keys.tolist() == [0, 6]
    assert places.windowed is not None
    behind = [*range(9), 7, 8, *range(9, 13), 7, 8, *range(13, 20)]
    assert places.windowed.places.tolist() == behind
    assert places.windowed.spans.keys.tolist() == [0, 3, 9, 15, 22, 24]
    assert places.windowed.spans.queries.tolist() == [0, 3, 9, 13, 18, 20]


@pytest.mark.parametrize("window", [None, 4, 5, 11])
def test_layers_with_another_window_attend_one_by_one(window: int | None) -> None:
    layout = make_pack_layout([6, 4, 5], [None, 0, 0])
    places = make_kernel_places(layout, CPU, 4)
    assert places.serves(window) == (window != 5)
    assert make_kernel_places(make_pack_layout([6, 4, 5]), CPU, 4).serves(5)


def test_a_cpu_and_what_the_kernel_lacks_take_the_other_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> Tensor:
        raise TakenPath

    monkeypatch.setattr(attention, "attend_at_once", refuse)
    layout = make_pack_layout([6, 4, 5], [None, 0, 0])
    on_cpu = place_segments(layout, CPU, None)
    assert on_cpu.kernel is None
    kernel = make_kernel_places(layout, CPU)
    given_kernel = SegmentPlaces(layout.offsets, layout.parents, kernel)
    # Double precision, and no GPU: torch reports that its kernel would not run.
    expected = attend(layout, on_cpu, 2, None)
    for ours, theirs in zip(attend(layout, given_kernel, 2, None), expected, strict=True):
        assert torch.equal(ours, theirs)
    monkeypatch.setattr(attention, "runs_on_flash", lambda *_: True)
    with pytest.raises(TakenPath):
        attend(layout, given_kernel, 2, None)


@pytest.mark.parametrize("checkpointing", ["off", "selective"])
def test_a_policy_learns_the_same_by_it(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: str
) -> None:
    """And kept answers of the kernel are not computed again."""
    alone = train(model_folder, share_prompts=False)
    placed: list[SegmentPlaces] = []

    def place(layout: PackLayout, device: torch.device, window: int | None) -> SegmentPlaces:
        kernel = make_kernel_places(layout, device, window)
        placed.append(SegmentPlaces(layout.offsets, layout.parents, kernel))
        return placed[-1]

    monkeypatch.setattr(attention, "runs_on_flash", lambda *_: True)
    monkeypatch.setattr(model, "place_segments", place)
    with flash_on_cpu() as counts:
        shared = train(model_folder, gradient_checkpointing=checkpointing)
    check_equal(shared, alone)
    layers, calls = 2, sum(1 + (each.kernel.prefixes is not None) for each in placed if each.kernel)
    assert counts[FORWARD] == layers * calls
    assert counts[BACKWARD]
