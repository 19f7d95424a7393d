"""Mismatch of a correct engine and trainer, on which the guard's bounds are based.

    python -m benchmarks.mismatch build/tiny-0
    python -m benchmarks.mismatch build/tiny-0 --device cuda    # engine and rank on one GPU

For each dtype, vLLM and a training rank get the same weights; vLLM samples, the rank scores. One
line for each, as in the table of docs/mismatch.md. About a minute for each dtype.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import AutoConfig, AutoTokenizer

from flotilla_common.domain.policy import PolicyId
from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.guard.mismatch_limits import BOUNDS
from flotilla_learner.guard.probes import Probe, ProbeResult, probe_batch
from flotilla_learner.rank.compare_command import CompareCommand
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.weight_slots import WeightSlots
from flotilla_learner.types import TrainBatch
from flotilla_rollout.adapters.vllm import VllmEngine
from flotilla_rollout.adapters.vllm_options import ServedModel
from flotilla_rollout.config.rollout import EngineConfig
from flotilla_rollout.types import Publication, Sampling

Dtype = Literal["float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")
# Engine and rank share a GPU, so the engine gets half of it.
DEVICES: Mapping[str, tuple[EngineConfig, RankConfig]] = {
    "cpu": (EngineConfig(device="cpu", max_num_seqs=64), RankConfig()),
    "cuda": (
        EngineConfig(device="cuda", max_num_seqs=64, gpu_memory_utilization=0.5),
        RankConfig(device="cuda"),
    ),
}
TASKS = Path("build/tasks/heldout.json")
TOKENS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="a folder of a Hugging Face model")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--device", choices=list(DEVICES), default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=DTYPES)
    given = parser.parse_args()
    print("dtype     temperature  tokens  mean     99.9 %   max      KL")
    for dtype in given.dtype:
        asyncio.run(measure_mismatch(given.model, dtype, given.samples, *DEVICES[given.device]))


async def measure_mismatch(
    model: Path, dtype: Dtype, samples: int, settings: EngineConfig, rank: RankConfig
) -> None:
    """Print one line for each temperature."""
    length = min(512, AutoConfig.from_pretrained(str(model)).max_position_embeddings)
    config = PolicyConfig(model=str(model), dtype=dtype, max_model_len=length)
    policy = load_policy(config, rank)
    engine = await VllmEngine.start_engine(settings, serve_policy(config))
    try:
        with tempfile.TemporaryDirectory() as folder:
            slots = WeightSlots(
                policy.named_parameters(), policy.compute_dtype, Path(folder), "bench"
            )
            path, fingerprint, manifest = slots.write_version(0)
            publication = Publication(
                policy=PolicyId(1, 0, fingerprint),
                manifest=manifest,
                total_bytes=slots.total_bytes,
                transport="shm",
                location=str(path),
                canary_token_ids=np.zeros(0, np.int32),
                timeout_s=60.0,
            )
            await engine.load_weights(publication, path)
            comparing = CompareCommand(policy, slots, config, rank)
            for temperature in (1.0, 0.7):
                batch = await sample_batch(engine, model, samples, temperature, length)
                found = comparing.run_comparison(batch, 0, diagnose=False).versions[0]
                print_row(dtype, temperature, found)
    finally:
        await engine.close()


def serve_policy(config: PolicyConfig) -> ServedModel:
    tokenizer: Any = AutoTokenizer.from_pretrained(config.model)
    return ServedModel(Path(config.model), config, [tokenizer.convert_tokens_to_ids("<|im_end|>")])


async def sample_batch(
    engine: VllmEngine, model: Path, samples: int, temperature: float, length: int
) -> TrainBatch:
    """Sample continuations of tasks' prompts, like the guard's."""
    probes = [
        Probe(ids[: length - TOKENS], TOKENS, temperature, seed)
        for seed, ids in enumerate(make_prompts(model, samples))
    ]
    requests = [
        engine.generate(p.prompt_token_ids, Sampling(temperature, p.seed), p.max_tokens)
        for p in probes
    ]
    answers = await asyncio.gather(*requests)
    return probe_batch(0, probes, [ProbeResult(a.token_ids, a.logprobs) for a in answers])


def make_prompts(model: Path, count: int) -> list[Any]:
    tokenizer: Any = AutoTokenizer.from_pretrained(str(model))
    tasks = json.loads(TASKS.read_text())["tasks"]
    texts = [tasks[number % len(tasks)]["prompt"] for number in range(count)]
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        for text in texts
    ]
    return [np.array(tokenizer.encode(chat, add_special_tokens=False), np.int32) for chat in chats]


def print_row(dtype: str, temperature: float, found: Any) -> None:
    bound = BOUNDS[dtype]
    print(
        f"{dtype:9} {temperature:11}  {found.tokens:6}  {found.abs_diff:.1e}  "
        f"{found.abs_diff_tail:.1e}  {found.abs_diff_max:.1e}  {found.kl:.1e}"
        f"   bound: {bound.mean:g}, {bound.tail:g}, -, {bound.kl:g}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
