"""Places of a pack's segments in the form that attention takes, made once a pack for all layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from flotilla_learner.algo.packing import PackLayout
from flotilla_learner.rank.device_transfer import to_device

# Start and end in a pack.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class KernelSpans:
    """Pairs of query and key spans, in the form that variable-length kernels take."""

    # [spans + 1] int32 each, on the device: spans lie end to end among the queries, and the keys.
    queries: Tensor
    keys: Tensor
    # Length of the longest span of each.
    most_queries: int
    most_keys: int

    @staticmethod
    def from_lengths(
        queries: Sequence[int], keys: Sequence[int], device: torch.device
    ) -> "KernelSpans":
        """Lay out spans of these lengths; none is 0."""
        ends = [np.cumsum([0, *lengths], dtype=np.int32) for lengths in (queries, keys)]
        starts, stops = (to_device(each, device) for each in ends)
        return KernelSpans(starts, stops, max(queries), max(keys))


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """Segments, end to end, that continue the same parent."""

    own: Span
    parent: Span


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Parents that segments continue: the queries of each run meet the keys of its parent."""

    runs: tuple[PrefixRun, ...]
    spans: KernelSpans


@dataclass(frozen=True, slots=True)
class WindowedKeys:
    """Keys of every segment, preceded by its parent's keys within a window."""

    window: int
    # [keys] int64, on the device: place of each in the pack.
    places: Tensor
    spans: KernelSpans


@dataclass(frozen=True, slots=True)
class KernelPlaces:
    """Segments of a pack in the form that a GPU's kernel takes."""

    # Each segment with itself.
    own: KernelSpans
    # Length of the longest segment with its parent.
    longest: int
    prefixes: SharedPrefixes | None = None
    # For models with a window that ends within a segment or its parent, if there are parents.
    windowed: WindowedKeys | None = None

    def serves(self, window: int | None) -> bool:
        """Return True if these suffice for layers with this window."""
        if window is None or window >= self.longest or self.prefixes is None:
            return True
        return self.windowed is not None and self.windowed.window == window


@dataclass(frozen=True, slots=True)
class SegmentPlaces:
    """Segments of a pack; see `PackLayout`."""

    offsets: tuple[int, ...]
    parents: tuple[int | None, ...]
    # On GPUs only.
    kernel: KernelPlaces | None = None


def place_segments(layout: PackLayout, device: torch.device, window: int | None) -> SegmentPlaces:
    """Return the places of a pack's segments for a model in which some layers may have a window.

    Transfer to a GPU is asynchronous."""
    kernel = None if device.type != "cuda" else make_kernel_places(layout, device, window)
    return SegmentPlaces(layout.offsets, layout.parents, kernel)


def make_kernel_places(
    layout: PackLayout, device: torch.device, window: int | None = None
) -> KernelPlaces:
    """Lay out segments for a kernel; those without tokens are left out."""
    filled = _filled_segments(layout)
    lengths = [end - start for (start, end), _ in filled]
    longest = max(end - start + _length(parent) for (start, end), parent in filled)
    prefixes = _find_prefixes(filled, device)
    windowed = None
    if prefixes is not None and window is not None and window < longest:
        windowed = _find_windowed(filled, window, device)
    own = KernelSpans.from_lengths(lengths, lengths, device)
    return KernelPlaces(own, longest, prefixes, windowed)


def _filled_segments(layout: PackLayout) -> list[tuple[Span, Span | None]]:
    """Return the place of each segment with tokens, and of its parent if that has some."""
    spans = list(zip(layout.offsets, layout.offsets[1:], strict=False))
    parents = [None if parent is None else spans[parent] for parent in layout.parents]
    pairs = zip(spans, parents, strict=True)
    return [(span, parent if _length(parent) else None) for span, parent in pairs if _length(span)]


def _length(span: Span | None) -> int:
    return 0 if span is None else span[1] - span[0]


def _find_prefixes(
    filled: Sequence[tuple[Span, Span | None]], device: torch.device
) -> SharedPrefixes | None:
    runs: list[PrefixRun] = []
    for parent, members in groupby(filled, key=lambda pair: pair[1]):
        spans = [span for span, _ in members]
        if parent is not None:
            runs.append(PrefixRun((spans[0][0], spans[-1][1]), parent))
    if not runs:
        return None
    queries, keys = [_length(run.own) for run in runs], [_length(run.parent) for run in runs]
    return SharedPrefixes(tuple(runs), KernelSpans.from_lengths(queries, keys, device))


def _find_windowed(
    filled: Sequence[tuple[Span, Span | None]], window: int, device: torch.device
) -> WindowedKeys:
    seen = [min(window - 1, _length(parent)) for _, parent in filled]
    places = [
        np.concatenate([np.arange(parent[1] - reach, parent[1]) if parent else [], np.arange(*own)])
        for (own, parent), reach in zip(filled, seen, strict=True)
    ]
    queries = [_length(own) for own, _ in filled]
    spans = KernelSpans.from_lengths(queries, [len(each) for each in places], device)
    return WindowedKeys(window, to_device(np.concatenate(places).astype(np.int64), device), spans)
