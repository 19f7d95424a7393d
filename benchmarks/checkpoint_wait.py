"""Wait of a step for its checkpoint: `python -m benchmarks.checkpoint_wait`.

Two ranks that shard a model of 14 M parameters train on packs of 2,048 tokens. In turns, one step
saves a checkpoint, one runs while that is written, and one runs alone. A step is its training, its
publication, and the copy for a checkpoint. The last line is one JSON object:

- `saving`, `beside`: seconds of a step that saves, and of one beside the writing, over those of one
  alone; medians. The writer uses CPU, too: with as many cores as ranks, the ranks' own.
- `copy_s`, `write_s`: seconds of the copy, and from there until all files are fsynced.

About 2 minutes.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.ranks.local_ranks import LocalRanks
from flotilla_learner.types import CheckpointFiles, TrainBatch, TrainSequence

VOCABULARY, TOKENS, SEQUENCES, ROUNDS = 4096, 512, 4, 5
KINDS = ("saving", "beside", "alone")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    with TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(measure_steps(Path(folder), given.rounds))))


async def measure_steps(folder: Path, rounds: int) -> dict[str, float]:
    ranks = make_ranks(folder)
    found: defaultdict[str, list[float]] = defaultdict(list)
    try:
        await ranks.start_ranks(None)
        # The first step allocates the moments.
        await make_step(ranks, 1)
        for number in range(rounds):
            await measure_round(ranks, folder / f"checkpoint-{number}", 3 * number + 2, found)
    finally:
        await ranks.close()
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    return {
        "saving": round(medians["saving"] / medians["alone"], 3),
        "beside": round(medians["beside"] / medians["alone"], 3),
        **{name: round(medians[name], 3) for name in ("copy_s", "write_s", "alone")},
    }


async def measure_round(
    ranks: LocalRanks, folder: Path, step: int, found: defaultdict[str, list[float]]
) -> None:
    """Measure one step of each kind, from `step` on."""
    writing: asyncio.Future[CheckpointFiles] | None = None
    for kind in KINDS:
        if kind == "alone" and writing is not None:
            await writing
        began = time.perf_counter()
        await make_step(ranks, step)
        if kind == "saving":
            copying = time.perf_counter()
            written = await ranks.begin_checkpoint(folder)
            found["copy_s"].append(time.perf_counter() - copying)
            writing = asyncio.ensure_future(timed(written, found["write_s"]))
        found[kind].append(time.perf_counter() - began)
        step += 1


async def timed(written: Awaitable[CheckpointFiles], seconds: list[float]) -> CheckpointFiles:
    began = time.perf_counter()
    files = await written
    seconds.append(time.perf_counter() - began)
    return files


async def make_step(ranks: LocalRanks, step: int) -> None:
    await ranks.train_step(make_batch(step))
    await ranks.publish_weights(step)


def make_ranks(folder: Path) -> LocalRanks:
    model, shared = folder / "model", folder / "shared"
    shared.mkdir()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 6}
    heads: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64}
    config = Qwen3Config(vocab_size=VOCABULARY, tie_word_embeddings=True, **sizes, **heads)
    Qwen3ForCausalLM(config).save_pretrained(model)
    learner = LearnerConfig.model_validate(
        {
            "tasks": "none.json",
            "steps": 100,
            "groups_per_step": 2,
            "group_size": 2,
            "rank": {"processes": 2, "shard": True, "post_update_tokens": 0},
        }
    )
    policy = PolicyConfig(model=str(model), dtype="float32", max_model_len=TOKENS)
    return LocalRanks("wait", policy, learner, folder / "rank.log", shared)


def make_batch(step: int) -> TrainBatch:
    chooser = np.random.default_rng(step)
    sequences = tuple(
        TrainSequence(
            group_id=f"group-{index // 2}",
            attempt_index=index % 2,
            reward=float(index % 2),
            token_ids=chooser.integers(0, VOCABULARY, TOKENS).astype(np.int32),
            policy_mask=np.arange(TOKENS) >= TOKENS // 2,
            behaviour_logprobs=np.full(TOKENS, -8.0, np.float32),
            temperature=1.0,
            staleness=0,
        )
        for index in range(SEQUENCES)
    )
    return TrainBatch(step, sequences)


if __name__ == "__main__":
    main()
