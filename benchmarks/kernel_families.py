"""Seconds of a step by family of kernels, from torch's profiler, on a GPU or a CPU."""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

ATTENTION, PRODUCTS, COPIES = "attention", "matrix products", "copies"
VOCABULARY, OTHER, IDLE = "vocabulary-wide elementwise", "other", "idle"
FAMILIES: tuple[str, ...] = (ATTENTION, PRODUCTS, VOCABULARY, COPIES, OTHER, IDLE)
# Searched in this order, in the name of the kernel and of the operation that started it.
_NAMES = (
    (ATTENTION, re.compile(r"attention|flash|fmha|sdpa|attn", re.IGNORECASE)),
    (
        PRODUCTS,
        re.compile(
            r"gemm|gemv|nvjet|cutlass|cublas|xmma|::(add|b|add?b)?mm\b|::linear\b|::matmul\b|_mm\b",
            re.IGNORECASE,
        ),
    ),
    (COPIES, re.compile(r"memcpy|memset|::copy_|::_to_copy|::cat\b|::clone", re.IGNORECASE)),
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """Time that one operation took for itself; `shapes` are those of its inputs."""

    name: str
    shapes: Sequence[Sequence[int]]
    seconds: float


def family_of(kernel: Kernel, vocabulary: int) -> str:
    """Return the family of a kernel. A copy of logits counts as vocabulary-wide."""
    for family, names in _NAMES[:2]:
        if names.search(kernel.name):
            return family
    if any(vocabulary in shape for shape in kernel.shapes):
        return VOCABULARY
    return COPIES if _NAMES[2][1].search(kernel.name) else OTHER


def sum_families(kernels: Iterable[Kernel], vocabulary: int, wall_s: float) -> dict[str, float]:
    """Return the seconds of each family; idle is the rest of the wall time."""
    found: dict[str, float] = dict.fromkeys(FAMILIES, 0.0)
    for kernel in kernels:
        found[family_of(kernel, vocabulary)] += kernel.seconds
    found[IDLE] = max(0.0, wall_s - sum(found.values()))
    return found


def profile_steps(
    step: Callable[[], object], count: int, vocabulary: int, *, device: str
) -> dict[str, float]:
    """Profile `count` calls of `step`; return the seconds of each family in one of them."""
    on_gpu = device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities, record_shapes=True) as profiler:
        began = time.perf_counter()
        for _ in range(count):
            step()
        if on_gpu:
            torch.cuda.synchronize()
        wall = time.perf_counter() - began
    kernels = _read_kernels(profiler.events() or (), on_gpu=on_gpu)
    found = sum_families(kernels, vocabulary, wall)
    return {family: seconds / count for family, seconds in found.items()}


def _read_kernels(events: Iterable[Any], *, on_gpu: bool) -> Iterator[Kernel]:
    """Yield the kernels of the operations, which know the shapes of their inputs; on a CPU, the
    operations without what they call."""
    for event in events:
        shapes = [shape for shape in event.input_shapes or () if isinstance(shape, list)]
        if not on_gpu:
            yield Kernel(event.name, shapes, event.self_cpu_time_total / 1e6)
            continue
        for kernel in event.kernels:
            yield Kernel(f"{event.name} {kernel.name}", shapes, kernel.duration / 1e6)


def print_families(found: dict[str, float]) -> None:
    """Print the seconds of each family as a table."""
    whole = sum(found.values())
    print("| | ms of a step | share |")
    print("|---|---|---|")
    for family, seconds in found.items():
        print(f"| {family} | {1e3 * seconds:.2f} | {seconds / whole:.1%} |")
