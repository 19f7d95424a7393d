"""Adapters published alone over merged weights: `python -m benchmarks.lora_publish`.

A random Qwen3 in float32 with adapters of rank 16 at every linear layer, and two real vLLM engines
on a CPU, one thread each: one gets merged weights, one only the adapters (`policy.adapter_rank`).
They take turns, pair after pair:

- a publication: the rank writes it, every byte is copied and checked, the engine serves it;
- sampling: 8 concurrent turns of 64 tokens after prompts of 128;
- scoring: prompts of 512 tokens, without sampling.

The last line is one JSON object; each figure is the adapters' over the merged weights', the median
of the pairs, and CPU includes the engine's processes:

- `bytes`: size of a publication.
- `publish_cpu`, `publish_seconds`: from the start of writing to serving.
- `sampled_cpu`, `sampled_seconds`: per sampled token. `scored_cpu`: per scored token.
- `canary_diff`: the largest difference of a canary's logprob from the rank's, on either side.
- `merged`, `adapter`: the same figures of each side, in bytes and in seconds per publication or
  token.

About 3 minutes.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from flotilla_common.domain.policy import PolicyId
from flotilla_common.spec.spec import PolicyConfig
from flotilla_environments.tiny_policy.tokenizer import save_tokenizer, train_tokenizer
from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.canary import canary_token_ids
from flotilla_learner.rank.model import Policy, score_tokens
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.weight_slots import WeightSlots
from flotilla_rollout.adapters.vllm_options import ServedModel
from flotilla_rollout.adapters.vllm_start import start_engines
from flotilla_rollout.config.rollout import EngineConfig
from flotilla_rollout.ports import Engine, PolicyFeed
from flotilla_rollout.types import Publication, Sampling
from flotilla_rollout.work.weight_staging import stage_weights

SHAPE: Mapping[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
LORA = LoraConfig(rank=16, alpha=32)
TURNS, PROMPT, SAMPLED, SCORED = 8, 128, 64, 512
# Practically never ends a turn.
NEVER = SHAPE["vocab_size"] - 1
PAIRS = 3


@dataclass(frozen=True, slots=True)
class Cost:
    cpu: float
    seconds: float

    def per(self, count: int) -> "Cost":
        return Cost(self.cpu / count, self.seconds / count)


class Side:
    """A rank's policy, its slots, and an engine that loads their weights."""

    def __init__(self, policy: Policy, engine: Engine, folder: Path) -> None:
        self._policy, self._engine, self._folder = policy, engine, folder
        folder.mkdir()
        self._slots = WeightSlots(
            policy.published_parameters(),
            policy.compute_dtype,
            folder,
            "run",
            merge=policy.published_tensor,
        )
        self._version = -1
        self.bytes = self._slots.total_bytes
        self.canary_diff = 0.0

    @torch.no_grad()
    def change_adapters(self) -> None:
        """Change the adapters' values, equally on both sides."""
        torch.manual_seed(self._version)
        for parameter in self._policy.trained_parameters().values():
            parameter.copy_(0.02 * torch.randn(parameter.shape))

    async def publish(self) -> None:
        """Write the current weights, and let the engine serve them."""
        self._version += 1
        path, fingerprint, manifest = self._slots.write_version(self._version)
        ids = canary_token_ids(self._policy.vocabulary)
        named = PolicyId(1, self._version, fingerprint)
        update = Publication(named, manifest, self.bytes, "shm", str(path), ids, timeout_s=60.0)
        staged = self._folder / "staged"
        await stage_weights(update, _NO_FEED, staged)
        await self._engine.load_weights(update, staged)

    async def check_canary(self) -> None:
        ids = canary_token_ids(self._policy.vocabulary)
        scored = await self._engine.compute_logprobs(ids)
        off = np.abs(scored - score_tokens(self._policy, ids, chunk=512)).max()
        self.canary_diff = max(self.canary_diff, float(off))

    async def sample(self) -> None:
        prompts = _draw_prompts(self._version, TURNS, PROMPT)
        turns = [
            self._engine.generate(prompt, Sampling(1.0, seed), SAMPLED)
            for seed, prompt in enumerate(prompts)
        ]
        written = await asyncio.gather(*turns)
        assert sum(len(turn.token_ids) for turn in written) == TURNS * SAMPLED

    async def score(self) -> None:
        for prompt in _draw_prompts(self._version + 1000, 2, SCORED):
            await self._engine.compute_logprobs(prompt)

    async def measure_round(self) -> dict[str, Cost]:
        self.change_adapters()
        published = await _measure(self.publish)
        await self.check_canary()
        sampled = (await _measure(self.sample)).per(TURNS * SAMPLED)
        scored = (await _measure(self.score)).per(2 * SCORED)
        return {"publish": published, "sampled": sampled, "scored": scored}


# Fetch nothing from the hub.
_NO_FEED: PolicyFeed = None  # pyright: ignore[reportAssignmentType]


def _draw_prompts(seed: int, count: int, length: int) -> list[np.ndarray]:
    drawn = np.random.default_rng(seed).integers(0, NEVER, (count, length))
    return list(drawn.astype(np.int32))


async def _measure(work: Callable[[], Awaitable[None]]) -> Cost:
    cpu, began = _cpu_seconds(), time.perf_counter()
    await work()
    return Cost(_cpu_seconds() - cpu, time.perf_counter() - began)


def _cpu_seconds() -> float:
    own = psutil.Process()
    spent = [each.cpu_times() for each in (own, *own.children(recursive=True))]
    return sum(times.user + times.system for times in spent)


def _make_model(folder: Path) -> None:
    tokenizer = train_tokenizer(["find book hotel user assistant"], 290)
    save_tokenizer(tokenizer, folder)
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(folder)


@asynccontextmanager
async def _start_side(model: Path, folder: Path, rank: int | None) -> AsyncGenerator[Side]:
    config = PolicyConfig(model=str(model), dtype="float32", max_model_len=1024, adapter_rank=rank)
    policy = load_policy(config, RankConfig(), lora=LORA)
    engine = await start_engines(
        EngineConfig(device="cpu", max_num_seqs=TURNS), ServedModel(model, config, [NEVER])
    )
    try:
        yield Side(policy, engine, folder)
    finally:
        await engine.close()


async def measure_sides(pairs: int, folder: Path) -> dict[str, Any]:
    """Return the figures; see the module."""
    _make_model(folder / "model")
    async with AsyncExitStack() as stack:
        names = {"merged": None, "adapter": LORA.rank}
        sides = {
            name: await stack.enter_async_context(
                _start_side(folder / "model", folder / name, rank)
            )
            for name, rank in names.items()
        }
        rounds = [
            {name: await side.measure_round() for name, side in sides.items()}
            for _ in range(pairs + 1)
        ]
    # The first pair warms up.
    return _summarise(sides, rounds[1:])


def _summarise(
    sides: Mapping[str, Side], rounds: list[dict[str, dict[str, Cost]]]
) -> dict[str, Any]:
    figures: dict[str, Any] = {"bytes": sides["adapter"].bytes / sides["merged"].bytes}
    own: dict[str, dict[str, float]] = {name: {"bytes": side.bytes} for name, side in sides.items()}
    for kind in ("publish", "sampled", "scored"):
        for clock in ("cpu", "seconds"):
            found = {name: [getattr(each[name][kind], clock) for each in rounds] for name in sides}
            pairs = zip(found["adapter"], found["merged"], strict=True)
            key = f"{kind}_{clock}"
            figures[key] = statistics.median(ours / theirs for ours, theirs in pairs)
            for name, values in found.items():
                own[name][key] = statistics.median(values)
    figures["canary_diff"] = max(side.canary_diff for side in sides.values())
    return {**figures, **own}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    shared = Path("/dev/shm")
    with TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        print(json.dumps(asyncio.run(measure_sides(given.pairs, Path(folder)))))


if __name__ == "__main__":
    main()
