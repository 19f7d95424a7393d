"""Cost of sampling through the front door of Tinker's SDK, over our own engine in process.

    python -m benchmarks.tinker_overhead build/tiny-0

The same prompts, seeds and lengths go through `VllmEngine.generate`, as the loop of a rollout calls
it, and through `flotilla tinker-serve`: HTTP, a journaled future, gRPC, and an engine with the same
options. Rounds of both sides take turns, for several lengths of answers; the tokens must be equal.
The last line is one JSON object; by length:

- `speed`: samples per second of our engine over those through the front, median of the pairs.
- `cpu`: CPU seconds of the front and the sampling service over those of our process, without vLLM's
  own process, `engine`; `cpu_with_engine`: with it. The client's are in neither.
- `ms`: CPU milliseconds of a sample by process, medians; `per_s`: samples per second of our engine
  and through the front; `tokens`: of an answer.

About 5 minutes.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rollout_loop import publish
from benchmarks.tinker_client import (
    ServedTinker,
    WireClient,
    http_session,
    sample_body,
    tinker_served,
)
from flotilla.tinker.v1 import tinker_wire_pb2 as pb
from flotilla_common.process.loaded_objects import freeze_loaded_objects
from flotilla_common.spec.spec import PolicyConfig
from flotilla_rollout.adapters.stop_tokens import read_eos_ids
from flotilla_rollout.adapters.vllm import VllmEngine
from flotilla_rollout.adapters.vllm_options import ServedModel
from flotilla_rollout.adapters.vllm_sampling import SEED_STRIDE
from flotilla_rollout.config.rollout import EngineConfig
from flotilla_rollout.types import Sampling

PAIRS, REQUESTS, CONCURRENT = 5, 192, 32
PROMPT, LENGTHS = 256, (16, 64, 256)
WINDOW = 1024
NAME = "bench"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# A prompt and its seed, to the sampled tokens.
Ask = Callable[[Sequence[int], int, int], Awaitable[Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Round:
    """What a round of requests took; CPU milliseconds of a sample by process."""

    per_s: float
    ms: Mapping[str, float]
    tokens: list[list[int]]


async def run_round(
    ask: Ask, processes: Mapping[str, int], number: int, length: int, vocabulary: int
) -> Round:
    """Send the requests of this number, so many concurrently."""
    draw = np.random.default_rng((number, length))
    prompts = draw.integers(vocabulary, size=(REQUESTS, PROMPT)).tolist()
    slots = asyncio.Semaphore(CONCURRENT)

    async def ask_one(seed: int, prompt: list[int]) -> list[int]:
        async with slots:
            return list(await ask(prompt, number * REQUESTS + seed, length))

    before, began = _cpu_seconds(processes), time.perf_counter()
    tokens = await asyncio.gather(*(ask_one(*each) for each in enumerate(prompts, 1)))
    wall_s, after = time.perf_counter() - began, _cpu_seconds(processes)
    ms = {name: (after[name] - before[name]) / REQUESTS * 1e3 for name in processes}
    return Round(REQUESTS / wall_s, ms, tokens)


def _cpu_seconds(processes: Mapping[str, int]) -> dict[str, float]:
    return {name: _cpu_of(pid) for name, pid in processes.items()}


def _cpu_of(pid: int) -> float:
    if pid == os.getpid():
        return time.process_time()
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(words[11]) + int(words[12])) * TICK_S


def find_engine(parent: int) -> int:
    """Return vLLM's process below ours. Raises LookupError."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(") ")
        except OSError:
            continue
        if int(rest.split()[1]) == parent and "VLLM" in name:
            return int(stat.parent.name)
    raise LookupError(f"process {parent} has no engine")


async def compare(model: Path, pairs: int, folder: Path) -> dict[str, Any]:
    policy = PolicyConfig(model=str(model), dtype="float32", max_model_len=WINDOW)
    settings = EngineConfig(device="cpu", max_num_seqs=CONCURRENT)
    tables = {
        "policy": {"dtype": "float32", "max_model_len": WINDOW},
        # As our engine, it has no room for adapters.
        "rollout": {
            "engine": {"device": "cpu", "max_num_seqs": CONCURRENT},
            "sampling": {"max_rank": 0},
        },
        "learner": {"rank": {"device": "cpu"}},
    }
    served_model = ServedModel(model, policy, read_eos_ids(model))
    engine = await VllmEngine.start_engine(settings, served_model)
    try:
        await publish(engine, policy, folder)
        freeze_loaded_objects()
        async with tinker_served(model, folder / "front", (NAME,), **tables) as served:
            return await _compare_sides(engine, served, model, pairs)
    finally:
        await engine.close()


async def _compare_sides(
    engine: VllmEngine, served: ServedTinker, model: Path, pairs: int
) -> dict[str, Any]:
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    own = {"own": os.getpid(), "engine": find_engine(os.getpid())}
    front, sampler = (
        served.find_service(name) for name in ("flotilla_tinker", "flotilla_rollout.sampling")
    )
    assert front and sampler
    theirs = {"front": front, "sampler": sampler, "engine": find_engine(sampler)}
    found: dict[str, Any] = {}
    async with http_session() as http:
        client = WireClient(http, served.url, served.keys[NAME])
        ask = await make_asker(client, str(model))
        for length in LENGTHS:
            rounds: list[tuple[Round, Round]] = []
            for number in range(pairs + 1):
                one = await run_round(ask_engine(engine), own, number, length, vocabulary)
                more = {**theirs, "client": os.getpid()}
                other = await run_round(ask, more, number, length, vocabulary)
                assert one.tokens == other.tokens
                rounds.append((one, other))
            # The first pair warms up.
            found[str(length)] = describe_rounds(rounds[1:])
            print(length, json.dumps(found[str(length)]), flush=True)
    return found


def ask_engine(engine: VllmEngine) -> Ask:
    async def ask(prompt: Sequence[int], seed: int, length: int) -> Sequence[int]:
        ids = np.array(prompt, np.int32)
        return (await engine.generate(ids, Sampling(1.0, seed), length)).token_ids.tolist()

    return ask


async def make_asker(client: WireClient, model: str) -> Ask:
    """Return a function that samples from the base, through a sampling session of its own."""
    session_id = await client.open_session()
    sampler_id = await client.open_sampler(session_id, 0, base_model=model)
    numbers = iter(range(10**9))

    async def ask(prompt: Sequence[int], seed: int, length: int) -> Sequence[int]:
        # As our engine derives a turn's seed.
        derived = (seed + len(prompt) * SEED_STRIDE) % 2**63
        body = sample_body(sampler_id, next(numbers), prompt, derived, length)
        request_id = json.loads(await client.send("asample", body))["request_id"]
        answer = pb.SampleResponse.FromString(await client.fetch(request_id))
        return np.frombuffer(answer.sequences[0].tokens, "<i4").tolist()

    return ask


def describe_rounds(rounds: Sequence[tuple[Round, Round]]) -> dict[str, Any]:
    def ms(side: int, name: str) -> float:
        return round(statistics.median(pair[side].ms[name] for pair in rounds), 3)

    cpu = [(other.ms["front"] + other.ms["sampler"]) / one.ms["own"] for one, other in rounds]
    all_of = [
        (other.ms["front"] + other.ms["sampler"] + other.ms["engine"]) / sum(one.ms.values())
        for one, other in rounds
    ]
    speed = [one.per_s / other.per_s for one, other in rounds]
    per_s = [round(statistics.median(pair[side].per_s for pair in rounds), 1) for side in (0, 1)]
    return {
        "speed": round(statistics.median(speed), 2),
        "speed_all": [round(each, 2) for each in speed],
        "cpu": round(statistics.median(cpu), 2),
        "cpu_all": [round(each, 2) for each in cpu],
        "cpu_with_engine": round(statistics.median(all_of), 2),
        "per_s": per_s,
        "tokens": round(statistics.mean(len(ids) for one, _ in rounds for ids in one.tokens), 1),
        "ms": {name: ms(0, name) for name in ("own", "engine")}
        | {f"through_{name}": ms(1, name) for name in ("front", "sampler", "engine", "client")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="a folder of a small Hugging Face model")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asyncio.run(compare(given.model.absolute(), given.pairs, Path(folder)))))


if __name__ == "__main__":
    main()
