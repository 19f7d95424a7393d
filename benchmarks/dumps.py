"""Cost of dumps: `python -m benchmarks.dumps [--attempts 64] [--length 512]`.

A rank trains a tiny random model on one step and hands over its tokens' numbers; the dump process
writes the step's files from a journal. A tiny model is the worst case: a larger one has longer
steps, but not longer dumps. The last line is one JSON object:

- `step_s`: seconds of the step; `share`: the part of the step that is spent on dumps. The rank
  writes its numbers to shared memory (`write_s`), the service takes them (`offer_s`).
- `cpu_s_per_million`: CPU seconds of the dump process per million tokens, prompts included.
- `stats_bytes`, `rollout_bytes`: bytes per policy token in token_stats, and per token in rollouts.
- `attempts`, `tokens`, `policy_tokens`.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from benchmarks.rank_step import SHAPES, load_shape, random_batch
from flotilla_common.domain.attempts import AttemptKey, Purpose, StopReason
from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.token_authors import Author, Span
from flotilla_common.domain.trajectory import Sequence as Sampled
from flotilla_common.domain.trajectory import Trajectory, content_digest
from flotilla_common.run_folder.dump_files import rollouts_path
from flotilla_common.run_folder.token_stats import stats_path
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.dumps.jobs import DumpSetup
from flotilla_learner.dumps.run_dumps import RunDumps
from flotilla_learner.group_types import GroupSpec, Lease
from flotilla_learner.journal.schema import Plan
from flotilla_learner.journal.store import open_journal
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.trainer import Trainer
from flotilla_learner.ranks import protocol
from flotilla_learner.sampling.tasks import Task
from flotilla_learner.types import StepResult, TrainBatch

VOCABULARY = SHAPES["tiny"].vocabulary
POLICY = PolicyId(1, 0, b"f" * 16)
STEPS = 3


def train(folder: Path, attempts: int, length: int) -> tuple[list[StepResult], list[float]]:
    """Train steps of one batch; return their results and seconds."""
    rank = RankConfig(threads=torch.get_num_threads())
    policy = load_shape("tiny", length, folder, rank)
    optimizer = Optimizer(policy.named_parameters(), OptimizerConfig(), offload=False)
    trainer = Trainer(policy, optimizer, AlgorithmConfig(), rank)
    results, seconds = list[StepResult](), list[float]()
    for step in range(STEPS + 1):
        batch = random_batch(step + 1, attempts, length, VOCABULARY)
        began = time.perf_counter()
        results.append(trainer.train_step(batch, lr=1e-6))
        seconds.append(time.perf_counter() - began)
    # The first step warms up.
    return results[1:], seconds[1:]


def write_tokens(results: Sequence[StepResult], folder: Path) -> tuple[list[StepResult], float]:
    """Hand the numbers over as a rank does; return the results with their files, and seconds."""
    written, seconds = list[StepResult](), list[float]()
    for step, result in enumerate(results, 2):
        assert result.tokens is not None
        path = protocol.token_path(folder, "benchmark", step)
        began = time.perf_counter()
        protocol.write_tokens(path, result.tokens)
        seconds.append(time.perf_counter() - began)
        written.append(replace(result, tokens=None, token_file=path))
    return written, statistics.median(seconds)


async def fill_journal(run_dir: Path, attempts: int, length: int) -> None:
    """Journal the plans of all steps, and the attempts whose numbers the ranks hand out."""
    journal = open_journal(run_dir)
    await journal.begin_epoch(1)
    for step in range(2, STEPS + 2):
        spec = GroupSpec(
            *(f"g{step:06d}r0", step, Task("task", "booking", json.dumps({"prompt": "x"}))),
            *(Purpose.TRAIN, attempts, 1.0),
        )
        await journal.add_lease(Lease(spec.group_id, spec, (), POLICY, "w0", 0.0), "i", "r", 1)
        batch = random_batch(step, attempts, length, VOCABULARY)
        made = [trajectory_of(batch, index, spec.group_id) for index in range(attempts)]
        await asyncio.gather(*(journal.add_trajectory(each) for each in made))
        keys = tuple(each.key for each in made)
        await journal.commit_plan(Plan(step, keys), 1, [spec.group_id], [])
    await journal.close()


def trajectory_of(batch: TrainBatch, index: int, group: str) -> Trajectory:
    source = batch.sequences[index]
    half = len(source.token_ids) // 2
    spans = (
        Span(Author.PROMPT, half),
        Span(Author.POLICY, len(source.token_ids) - half, POLICY, 1.0),
    )
    sequence = Sampled(source.token_ids, spans, source.behaviour_logprobs[half:])
    return Trajectory(
        key=AttemptKey(group, index, 0),
        lease_id=group,
        sequences=(sequence,),
        content_digest=content_digest((sequence,)),
        reward=source.reward,
        stop_reason=StopReason.DONE,
    )


def save_tokenizer(folder: Path) -> None:
    words = {f"w{number}": number for number in range(VOCABULARY)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


async def dump(setup: DumpSetup, results: Sequence[StepResult]) -> tuple[float, float]:
    """Let the process write the dumps; return the seconds of an offer, and its CPU seconds."""
    dumps = RunDumps(setup, Path(setup.run_dir) / "dumps.log")
    try:
        # Start the process and its imports.
        dumps.offer_eval("before-1-0", "before", 0, {})
        await dumps.finish()
        [child] = psutil.Process().children()
        before, seconds = sum(child.cpu_times()[:2]), list[float]()
        for step, result in enumerate(results, 2):
            began = time.perf_counter()
            dumps.offer_step(step, result)
            seconds.append(time.perf_counter() - began)
            await dumps.finish()
        spent = sum(child.cpu_times()[:2]) - before
        if dumps.lost:
            raise RuntimeError(f"{dumps.lost} dumps were lost, see {setup.run_dir}/dumps.log")
    finally:
        await dumps.close()
    return statistics.median(seconds), spent


def measure(folder: Path, attempts: int, length: int) -> dict[str, Any]:
    model, run_dir = folder / "model", folder / "run"
    results, step_seconds = train(model, attempts, length)
    save_tokenizer(model)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        handed, write_s = write_tokens(results, Path(shm))
        asyncio.run(fill_journal(run_dir, attempts, length))
        setup = DumpSetup(str(run_dir), str(model), None, every=1, keep=20, picture_bytes=0)
        offer_s, cpu_s = asyncio.run(dump(setup, handed))
    step_s, tokens = statistics.median(step_seconds), attempts * length
    policy_tokens = attempts * (length - length // 2)
    return {
        "step_s": round(step_s, 3),
        "write_s": round(write_s, 5),
        "offer_s": round(offer_s, 6),
        "share": round((write_s + offer_s) / step_s, 5),
        "cpu_s_per_million": round(1e6 * cpu_s / (STEPS * tokens), 2),
        "stats_bytes": round(stats_path(run_dir, 2).stat().st_size / policy_tokens, 1),
        "rollout_bytes": round(rollouts_path(run_dir, 2).stat().st_size / tokens, 1),
        "attempts": attempts,
        "tokens": tokens,
        "policy_tokens": policy_tokens,
    }


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attempts", type=int, default=64, help="sequences of each step")
    parser.add_argument("--length", type=int, default=512, help="tokens of each sequence")
    wanted = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), wanted.attempts, wanted.length)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
