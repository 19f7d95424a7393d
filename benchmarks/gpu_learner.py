"""Speed and memory of one rank over packed sequences: `python -m benchmarks.gpu_learner`.

Trains a random model of the shape of Qwen3-0.6B in bfloat16, as a rank does, on packs of 16,384 and
65,536 tokens: sequences of 4,096, of which the second half is the policy's. Needs a GPU, and from
this repository's environment torch, transformers, peft, safetensors, numpy, pydantic, psutil and
grpcio. With `--tiny`: a tiny model, on a CPU. The last line is one JSON object, with these figures
for each length of a pack:

- `tokens_per_s`: all tokens of a step over its median seconds: scoring, training and the update.
  `wall_tokens_per_s`: those of all timed steps over the time from the first's begin to the last's
  end, with what lies between them.
- `mfu`: the work that these tokens take (`benchmarks.executed_work`: attention within each
  sequence, the head on the policy's tokens only) over the GPU's published peak in bfloat16;
  `wall_mfu` the same by wall time.
- `peak_gib`: the peak memory of tensors on the device, or of the process on a CPU; `between_gib`:
  the memory between steps.
- `cpu_s`: the process's CPU seconds of a step, the median.
- `families`, with `--profile`: the seconds of a step by family of kernels, of two more steps.

`--like prime-rl` measures what prime-rl's benchmark does, and prints its published figures for one
H100 beside: a step of two packs, each of them one sequence, with all tokens in the loss. Compare
those with a run on an H100, by `wall_tokens_per_s`.

With `--compile` each length is measured twice, without and with compiled decoder blocks
(`learner.rank.compile`; the field `compiled`). `compiled_share` has for each length the seconds of
a compiled step over those of an uncompiled one; on a CPU, of `cpu_s`.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.executed_work import model_work
from benchmarks.kernel_families import print_families, profile_steps
from benchmarks.rank_step import SHAPES, load_shape, random_batch
from flotilla_common.process.process_memory import peak_memory_bytes
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.trainer import Trainer
from flotilla_learner.types import TrainBatch

GIB = 2**30
PACKS, SEQUENCE, STEPS = (16_384, 65_536), 4_096, 4
# NVIDIA's published peaks for dense bfloat16 products, by a part of the device's name.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}
PRIME_RL = "prime-rl"
# Its published tokens a second of wall time and GiB, by the tokens of a pack (full training of
# Qwen3-0.6B by RL on one H100, compiled, its benchmark's baselines of June 2026).
PUBLISHED = {16_384: (11_900, 12.5), 65_536: (10_150, 19.6)}
_PROFILED_STEPS = 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a measurement. A step is a pack of sequences of one length, or like prime-rl's two
    packs of one sequence."""

    shape: str
    device: str
    packs: tuple[int, ...]
    sequence: int
    steps: int
    compiled: bool = False
    like_prime_rl: bool = False
    profiled: bool = False

    def lengths(self, pack: int) -> tuple[int, ...]:
        """Return the lengths of a step's sequences."""
        return (pack, pack) if self.like_prime_rl else (self.sequence,) * (pack // self.sequence)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--packs", type=int, nargs="+", default=PACKS, help="tokens of a pack")
    parser.add_argument("--sequence", type=int, default=SEQUENCE, help="tokens of a sequence")
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b")
    parser.add_argument("--steps", type=int, default=STEPS, help="timed steps, after two more")
    parser.add_argument("--compile", action="store_true", help="measure compiled blocks beside")
    parser.add_argument("--like", choices=(PRIME_RL,), help="measure what its benchmark does")
    parser.add_argument("--profile", action="store_true", help="sum kernels by family")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU")
    given = parser.parse_args(words)
    sizes = Sizes(given.shape, "cuda", tuple(given.packs), given.sequence, given.steps)
    sizes = replace(sizes, like_prime_rl=given.like == PRIME_RL, profiled=given.profile)
    if given.tiny:
        sizes = replace(sizes, shape="tiny", device="cpu", packs=(64, 128), sequence=32)
    elif not torch.cuda.is_available():
        sys.exit("error: no GPU is visible to torch; --tiny runs the same code on a CPU")
    kinds = (sizes, replace(sizes, compiled=True)) if given.compile else (sizes,)
    found = [measure_pack(each, pack) for pack in sizes.packs for each in kinds]
    print_table(found, sizes)
    figures = {"torch": torch.__version__, "device": device_name(sizes), "packs": found}
    shares = {"compiled_share": compiled_shares(found, sizes)} if given.compile else {}
    print(json.dumps({**figures, **shares}))


def measure_pack(sizes: Sizes, pack: int) -> dict[str, Any]:
    """Return the figures of steps over packs of `pack` tokens."""
    # Only garbage collection frees a model with compiled blocks.
    gc.collect()
    rank = RankConfig.model_validate(
        {
            "device": sizes.device,
            "threads": torch.get_num_threads(),
            "pack_tokens": pack,
            "head_chunk": 1024,
            "gradient_checkpointing": "full" if sizes.device == "cuda" else "off",
            "post_update_tokens": 0,
            "compile": sizes.compiled,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        policy = load_shape(sizes.shape, max(sizes.lengths(pack)), Path(folder), rank)
    adamw = Optimizer(policy.named_parameters(), OptimizerConfig(lr=1e-6))
    trainer = Trainer(policy, adamw, AlgorithmConfig(), rank)
    # Compilation, tuning, allocation.
    for step in (1, 2):
        time_step(trainer, sizes, pack, step)
    began = time.perf_counter()
    times = [time_step(trainer, sizes, pack, step) for step in range(3, sizes.steps + 3)]
    wall = time.perf_counter() - began
    seconds, cpu = (statistics.median(each) for each in zip(*times, strict=True))
    tokens, work = sum(sizes.lengths(pack)), step_work(policy, sizes, pack)
    if policy.compiled is not None and policy.compiled.why_not is not None:
        raise RuntimeError(f"blocks were not compiled: {policy.compiled.why_not}")
    peak, between = device_memory(sizes)
    return {
        "pack": pack,
        "compiled": sizes.compiled,
        "tokens_per_s": round(tokens / seconds),
        "wall_tokens_per_s": round(sizes.steps * tokens / wall),
        "gflops_per_token": round(work / tokens / 1e9, 3),
        "mfu": rounded_share(work / seconds, sizes),
        "wall_mfu": rounded_share(sizes.steps * work / wall, sizes),
        "peak_gib": round(peak / GIB, 2),
        "between_gib": round(between / GIB, 2),
        "step_s": round(seconds, 4),
        "cpu_s": round(cpu, 4),
        **profile_pack(trainer, sizes, pack),
    }


def profile_pack(trainer: Trainer, sizes: Sizes, pack: int) -> dict[str, Any]:
    """Return the seconds of a step by family of kernels, if they are asked for."""
    if not sizes.profiled:
        return {}
    steps = iter(range(sizes.steps + 3, sizes.steps + 3 + _PROFILED_STEPS))
    found = profile_steps(
        lambda: time_step(trainer, sizes, pack, next(steps)),
        _PROFILED_STEPS,
        SHAPES[sizes.shape].vocabulary,
        device=sizes.device,
    )
    print(f"One step over packs of {pack:,} tokens{', compiled' * sizes.compiled}:\n")
    print_families(found)
    print()
    return {"families": {family: round(seconds, 6) for family, seconds in found.items()}}


def time_step(trainer: Trainer, sizes: Sizes, pack: int, step: int) -> tuple[float, float]:
    """Make one step; return its seconds, and those of this process's CPU."""
    batch = make_batch(step, sizes, pack)
    if sizes.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    began, cpu = time.perf_counter(), time.process_time()
    result = trainer.train_step(batch, lr=1e-6)
    if sizes.device == "cuda":
        torch.cuda.synchronize()
    if result.skipped:
        raise RuntimeError(f"step {step} was refused: {result.metrics}")
    return time.perf_counter() - began, time.process_time() - cpu


def compiled_shares(found: Sequence[dict[str, Any]], sizes: Sizes) -> dict[int, float]:
    """Return by length the time of a compiled step over that of an uncompiled one."""
    key = "cpu_s" if sizes.device == "cpu" else "step_s"
    times = {(row["pack"], row["compiled"]): row[key] for row in found}
    return {pack: round(times[pack, True] / times[pack, False], 3) for pack in sizes.packs}


def make_batch(step: int, sizes: Sizes, pack: int) -> TrainBatch:
    lengths = sizes.lengths(pack)
    vocabulary = SHAPES[sizes.shape].vocabulary
    return random_batch(step, len(lengths), lengths[0], vocabulary, whole=sizes.like_prime_rl)


def step_work(policy: Policy, sizes: Sizes, pack: int) -> float:
    """Return the floating-point operations that a step takes."""
    count = sum(p.numel() for p in policy.named_parameters().values())
    trained = sum(int(each.policy_mask.sum()) for each in make_batch(0, sizes, pack).sequences)
    return model_work(policy.config, count).step_flops(sizes.lengths(pack), trained)


def rounded_share(flops: float, sizes: Sizes) -> float | None:
    """Return the share of the device's peak; None if the peak is unknown."""
    name = device_name(sizes)
    peaks = [peak for part, peak in PEAK_FLOPS.items() if part in name]
    return round(flops / peaks[0], 4) if peaks else None


def device_name(sizes: Sizes) -> str:
    return torch.cuda.get_device_name() if sizes.device == "cuda" else "CPU"


def device_memory(sizes: Sizes) -> tuple[int, int]:
    """Return the peak bytes of the last step, and those between steps."""
    if sizes.device == "cpu":
        return peak_memory_bytes(), 0
    return torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()


def print_table(found: Sequence[dict[str, Any]], sizes: Sizes) -> None:
    print(
        "| | tokens of a pack | tokens/s | by wall time | executed work of the peak | GiB at most |"
    )
    print("|---|---|---|---|---|---|")
    for row in found:
        share = "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}"
        rates = (f"{row['tokens_per_s']:,}", f"{row['wall_tokens_per_s']:,}")
        name = "Flotilla" + ", compiled" * row["compiled"]
        print_row(name, f"{row['pack']:,}", *rates, share, row["peak_gib"])
    published = PUBLISHED.items() if sizes.like_prime_rl else ()
    for pack, (rate, gib) in published:
        print_row("prime-rl, published, H100", f"{pack:,}", "", f"{rate:,}", "", gib)


def print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
