"""Memory and speed of one training rank on one GPU: `python -m benchmarks.rank_step 1.7b 4b`.

Builds random-weight models with the layer shapes of published Qwen3 checkpoints, trains each for a
few steps with GRPO on sequences of one length, and prints one line for each. The last line is one
JSON object, a list of figures for each model under `models`:

- `parameters`: in billions, a tied head counted once.
- `device_gb`: the peak memory of tensors on the device during a step; `resident_gb`: the part that
  remains between steps.
- `host_gb`: the peak memory of this process on the host.
- `step_seconds`: median of the timed steps; `tokens_per_second` follows from it.
- `mfu`: the work of a step (`benchmarks.executed_work`: attention within each sequence, the head on
  the policy's tokens only, no recomputed activations), as a share of the rate that the same device
  reached in a bfloat16 product of two 8192 x 8192 matrices just before.
- `families`, with `--profile`: the seconds of a step by family of kernels, of one more step.

`--like prime-rl`: each sequence fills a pack, and all its tokens are in the loss; `--attempts 2
--length 16384` is its benchmark's step.
- `failed`: the reason why a model has no figures, such as insufficient memory.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.executed_work import model_work
from benchmarks.kernel_families import profile_steps
from flotilla_common.process.process_memory import peak_memory_bytes
from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.trainer import Trainer
from flotilla_learner.types import TrainBatch, TrainSequence

GB = 1e9
VOCABULARY = 151_936


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    tied: bool
    vocabulary: int = VOCABULARY
    head_dim: int = 128


# Shapes of Qwen/Qwen3-*, and a tiny one for CPUs.
SHAPES: Mapping[str, Shape] = {
    "0.6b": Shape(1024, 3072, 28, 16, 8, tied=True),
    "1.7b": Shape(2048, 6144, 28, 16, 8, tied=True),
    "4b": Shape(2560, 9728, 36, 32, 8, tied=True),
    "8b": Shape(4096, 12288, 36, 32, 8, tied=False),
    "tiny": Shape(64, 128, 2, 4, 2, tied=True, vocabulary=512, head_dim=16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("shapes", nargs="+", choices=list(SHAPES), help="Qwen3 models to imitate")
    parser.add_argument("--length", type=int, default=4096, help="tokens of each sequence")
    parser.add_argument("--attempts", type=int, default=8, help="sequences of each step")
    parser.add_argument("--pack-tokens", type=int, default=16384)
    parser.add_argument("--head-chunk", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after a warm-up step")
    parser.add_argument("--like", choices=("prime-rl",), help="whole sequences in the loss")
    parser.add_argument("--profile", action="store_true", help="sum kernels by family")
    parser.add_argument("--offload", action="store_true", help="learner.rank.offload_optimizer")
    parser.add_argument("--keep-activations", action="store_true", help="disable recomputation")
    given = parser.parse_args()
    if given.like:
        given.pack_tokens = given.length
    if not torch.cuda.is_available():
        sys.exit("error: no GPU is visible to torch; this benchmark measures a rank on a GPU")
    peak = matmul_rate()
    found = [measure_shape(shape, given, peak) for shape in given.shapes]
    device = torch.cuda.get_device_name()
    print(json.dumps({"device": device, "matmul_tflops": peak / 1e12, "models": found}))


def matmul_rate() -> float:
    """Return the floating-point operations a second of a large bfloat16 matrix product."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times: list[float] = []
    for _ in range(13):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        _ = left @ right
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * 8192**3 / statistics.median(times[3:])


def measure_shape(shape: str, given: argparse.Namespace, peak: float) -> dict[str, Any]:
    """Return the figures of one model, or the reason of its failure."""
    try:
        figures = time_steps(shape, given, peak)
    except torch.OutOfMemoryError as error:
        figures = {"failed": str(error).partition(". GPU")[0]}
    torch.cuda.empty_cache()
    line = {"shape": shape, **figures}
    print(json.dumps(line), flush=True)
    return line


def time_steps(shape: str, given: argparse.Namespace, peak: float) -> dict[str, Any]:
    """Load the model as a rank does, and time its steps."""
    rank = RankConfig(
        device="cuda",
        threads=torch.get_num_threads(),
        pack_tokens=given.pack_tokens,
        head_chunk=given.head_chunk,
        gradient_checkpointing="off" if given.keep_activations else "full",
        offload_optimizer=given.offload,
    )
    with tempfile.TemporaryDirectory() as folder:
        policy = load_shape(shape, given.length, Path(folder), rank)
    optimizer = Optimizer(
        policy.named_parameters(), OptimizerConfig(lr=1e-6), offload=rank.offload_optimizer
    )
    trainer = Trainer(policy, optimizer, AlgorithmConfig(), rank)
    count = sum(p.numel() for p in policy.named_parameters().values())
    seconds: list[float] = []
    resident = 0
    for step in range(1, given.steps + 2):
        resident = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        started = time.monotonic()
        result = trainer.train_step(make_batch(step, given), lr=1e-6)
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - started)
        if result.skipped:
            raise RuntimeError(f"step {step} of the random {shape} model was refused")
    taken = statistics.median(seconds[1:])
    tokens, last = given.attempts * given.length, make_batch(given.steps + 2, given)
    trained = sum(int(each.policy_mask.sum()) for each in last.sequences)
    work = model_work(policy.config, count).step_flops([given.length] * given.attempts, trained)
    families: dict[str, Any] = {}
    if given.profile:
        families["families"] = profile_steps(
            lambda: trainer.train_step(last, lr=1e-6), 1, SHAPES[shape].vocabulary, device="cuda"
        )
    return {
        "parameters": count / 1e9,
        "device_gb": torch.cuda.max_memory_allocated() / GB,
        "resident_gb": resident / GB,
        "host_gb": peak_memory_bytes() / GB,
        "first_step_seconds": seconds[0],
        "step_seconds": taken,
        "tokens_per_second": tokens / taken,
        "mfu": work / taken / peak,
        **families,
    }


def make_batch(step: int, given: argparse.Namespace) -> TrainBatch:
    return random_batch(step, given.attempts, given.length, whole=bool(given.like))


def load_shape(shape: str, length: int, folder: Path, rank: RankConfig) -> Policy:
    """Write a random model of the shape and load it as a rank loads a policy."""
    sizes = SHAPES[shape]
    config = Qwen3Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=max(length, 4096),
        tie_word_embeddings=sizes.tied,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    with torch.device(rank.device):
        model: Any = Qwen3ForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    del model
    if rank.device == "cuda":
        torch.cuda.empty_cache()
    policy = PolicyConfig(model=str(folder), dtype="bfloat16", max_model_len=length)
    return load_policy(policy, rank)


def random_batch(
    step: int, attempts: int, length: int, vocabulary: int = VOCABULARY, *, whole: bool = False
) -> TrainBatch:
    """Return one group whose attempts differ in reward; the second half of each is the policy's, or
    the `whole` but the first token, which nothing predicts."""
    rng = np.random.default_rng(step)
    mask = np.arange(length) >= (1 if whole else length // 2)
    logprobs = np.where(mask, -np.log(vocabulary), 0).astype(np.float32)
    sequences = tuple(
        TrainSequence(
            group_id="group",
            attempt_index=attempt,
            reward=float(attempt % 2),
            token_ids=rng.integers(0, vocabulary, length).astype(np.int32),
            policy_mask=mask,
            behaviour_logprobs=logprobs,
            temperature=1.0,
            staleness=0,
        )
        for attempt in range(attempts)
    )
    return TrainBatch(step, sequences)


if __name__ == "__main__":
    main()
