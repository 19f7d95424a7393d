"""CPU of the episode loop over that of a bare AsyncLLM, and with an engine without cost.

    python -m benchmarks.rollout_loop build/tiny-0

Plays attempts of 6 turns through the loop, then sends their requests to the bare engine in the same
order and with the same concurrency; ten such pairs, interleaved, with turns of 24, 120 and 240
tokens. The ratio compares the CPU seconds of this process, without the engine's own. All requests
at once through `LLM.generate` are measured once, for reference. Then attempts of 6 and of 50 turns
with an engine that answers at once: microseconds of a turn and of a token, all of them the loop's.
Last, the longest blockage of the event loop while attempts with a prompt of 39,000 tokens begin.
About 4 minutes. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.mismatch import serve_policy
from flotilla_common.domain.attempts import AttemptKey, Grade, ToolOutcome
from flotilla_common.domain.policy import PolicyId
from flotilla_common.images.picture import ShownPicture
from flotilla_common.process.loaded_objects import freeze_loaded_objects
from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.weight_slots import WeightSlots
from flotilla_rollout.adapters.dialect_choice import choose_dialect
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer, load_tokenizer
from flotilla_rollout.adapters.vllm import VllmEngine
from flotilla_rollout.adapters.vllm_options import engine_options
from flotilla_rollout.config.rollout import DialectConfig, EngineConfig
from flotilla_rollout.episodes.attempt_limits import AttemptLimits
from flotilla_rollout.episodes.episode import Attempt, AttemptRunner
from flotilla_rollout.types import (
    Completion,
    EpisodeInfo,
    OpenRequest,
    PolicySpan,
    PromptFacts,
    Publication,
    Sampling,
    Tool,
    ToolResult,
)

ATTEMPTS, TURNS, PAIRS = 32, 6, 10
TURN_TOKENS = (24, 120, 240)
LONG_TURNS, LONG_TURN_TOKENS = 50, 375
LONG_PROMPT_WORDS = 26_000
POLICY = PolicyId(1, 0, b"b" * 32)
# Token ids, sampling options, maximum number of tokens.
Request = tuple[NDArray[np.int32], Sampling, int]
TOOLS = (Tool("look", "Looks.", {"type": "object", "properties": {"at": {"type": "string"}}}),)
FACTS = PromptFacts("Find it.", "2026-01-31", {})
CALL = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'


class ReadyEnvironment:
    """Environment in this process that opens at once and answers every call alike."""

    def __init__(self, facts: PromptFacts = FACTS) -> None:
        self.info = EpisodeInfo("e", TOOLS, facts, instance_id="i")

    @asynccontextmanager
    async def open_episode(self, request: OpenRequest) -> AsyncGenerator["ReadyEnvironment"]:
        yield self

    async def call_tool(self, name: str, arguments_json: str, timeout_s: float) -> ToolResult:
        return ToolResult(ToolOutcome.OK, ('{"found": 1}',))

    async def request_grade(
        self, final_answer: str | None, transcript: bytes, timeout_s: float
    ) -> Grade:
        return Grade(1.0)


@dataclass
class InstantEngine:
    """Engine that answers every request at once with the same tokens."""

    ids: NDArray[np.int32]
    policy: PolicyId | None = POLICY

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        max_tokens: int,
        timeout_s: float = inf,
        pictures: Sequence[ShownPicture] = (),
    ) -> Completion:
        logprobs = np.full(len(self.ids), -0.5, np.float32)
        return Completion(self.ids, logprobs, (PolicySpan(POLICY, len(self.ids)),), cut=False)


class BareEngine(VllmEngine):
    """Engine whose AsyncLLM can be called directly. Its turns have the maximum length."""

    async def ask_bare(self, attempts: Sequence[Sequence[Request]]) -> float:
        """Send the attempts' requests to AsyncLLM; return the CPU seconds of this process."""
        # A new salt: it must not hit the prefixes that the loop has cached.
        salt = uuid.uuid4().hex
        began = time.process_time()
        await asyncio.gather(*(self._ask_in_turn(requests, salt) for requests in attempts))
        return time.process_time() - began

    async def _ask_in_turn(self, requests: Sequence[Request], salt: str) -> None:
        for request in requests:
            prompt, params = self.make_bare_request(request, salt)
            async for _ in self._llm.generate(prompt, params, request_id=uuid.uuid4().hex):
                pass

    def make_bare_request(self, request: Request, salt: str) -> tuple[Any, Any]:
        """Return the prompt and the parameters for vLLM."""
        from vllm import TokensPrompt

        token_ids, sampling, most = request
        prompt = TokensPrompt(prompt_token_ids=token_ids.tolist(), cache_salt=salt)
        return prompt, self._make_params(sampling, len(token_ids), most)

    def _make_params(self, sampling: Sampling, length: int, max_tokens: int) -> Any:
        params = super()._make_params(sampling, length, max_tokens)
        params.stop_token_ids, params.ignore_eos = [], True
        return params


@dataclass
class CallingEngine:
    """Engine that replaces the policy's text by words and a call, so that all attempts have all
    their turns. It records the requests of each attempt, identified by its seed."""

    engine: BareEngine
    turn: NDArray[np.int32]
    requests: dict[int, list[Request]] = field(default_factory=dict[int, list[Request]])

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        max_tokens: int,
        timeout_s: float = inf,
        pictures: Sequence[ShownPicture] = (),
    ) -> Completion:
        self.requests.setdefault(sampling.seed, []).append((token_ids, sampling, max_tokens))
        sampled = await self.engine.generate(token_ids, sampling, max_tokens, timeout_s, pictures)
        return Completion(self.turn, sampled.logprobs, sampled.spans, cut=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path, help="a folder of a small Hugging Face model")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    given = parser.parse_args()
    if not given.model.is_dir():
        parser.error(f"{given.model} is not a folder; `make demo` builds build/tiny-0")
    print(json.dumps(asyncio.run(measure_loop(given.model, given.pairs))))


async def measure_loop(model: Path, pairs: int) -> dict[str, Any]:
    tokenizer = load_tokenizer(model)
    freeze_loaded_objects()
    found: dict[str, Any] = {}
    for turns, tokens in ((TURNS, 0), (LONG_TURNS, LONG_TURN_TOKENS)):
        found[f"us_per_turn_at_{turns}"] = await time_turns(tokenizer, turns, tokens)
    found["us_per_token_at_50"] = found[f"us_per_turn_at_{LONG_TURNS}"] / LONG_TURN_TOKENS
    found["longest_hold_ms"] = await time_holds(tokenizer)
    found |= await compare_with_bare_engine(model, tokenizer, pairs)
    return {key: round(each, 3) if isinstance(each, float) else each for key, each in found.items()}


def make_runner(
    engine: Any,
    environment: Any,
    tokenizer: TransformersTokenizer,
    turns: int = TURNS,
    tokens: int = TURN_TOKENS[0],
) -> AttemptRunner:
    # Invalid turns of an untrained policy must not end its attempts.
    dialect = choose_dialect("", tokenizer, DialectConfig(name="full"))
    limits = replace(LIMITS, max_turns=turns, max_generate_length=tokens)
    return AttemptRunner(engine, environment, tokenizer, dialect, limits)


LIMITS = AttemptLimits(
    max_turns=TURNS,
    max_input_length=100_000,
    max_generate_length=24,
    max_model_len=200_000,
    attempt_timeout_s=600.0,
    call_timeout_s=60.0,
    grade_timeout_s=60.0,
)


def make_attempts(count: int) -> list[Attempt]:
    return [
        Attempt(AttemptKey("g", n, 0), '{"key": "t"}', Sampling(1.0, n), 1, 1200.0)
        for n in range(count)
    ]


def make_turn(tokenizer: TransformersTokenizer, tokens: int) -> NDArray[np.int32]:
    """Return a turn that ends with a call, padded to this number of tokens."""
    end = tokenizer.encode(CALL + "<|im_end|>")
    padding = tokenizer.encode("it " * tokens)[: max(tokens - len(end), 0)]
    return np.array([*padding, *end], np.int32)


async def play_all(runner: AttemptRunner, attempts: Sequence[Attempt]) -> float:
    """Play attempts concurrently; return the CPU seconds of this process."""
    began = time.process_time()
    await asyncio.gather(*(runner.run_attempt(attempt) for attempt in attempts))
    return time.process_time() - began


async def time_turns(tokenizer: TransformersTokenizer, turns: int, tokens: int) -> float:
    """Return the CPU microseconds of a turn with an engine without cost."""
    engine = InstantEngine(make_turn(tokenizer, tokens))
    runner = make_runner(engine, ReadyEnvironment(), tokenizer, turns)
    await play_all(runner, make_attempts(4))
    costs = [await play_all(runner, make_attempts(20)) for _ in range(5)]
    return min(costs) / (20 * turns) * 1e6


async def time_holds(tokenizer: TransformersTokenizer) -> float:
    """Return the longest blockage of the loop in milliseconds while attempts began."""
    facts = PromptFacts("word " * LONG_PROMPT_WORDS, "2026-01-31", {})
    engine = InstantEngine(np.array(tokenizer.encode("<done><|im_end|>"), np.int32))
    runner = make_runner(engine, ReadyEnvironment(facts), tokenizer)
    longest = 0.0
    done = asyncio.Event()

    async def watch() -> None:
        nonlocal longest
        while not done.is_set():
            began = time.perf_counter()
            await asyncio.sleep(0)
            longest = max(longest, time.perf_counter() - began)

    watching = asyncio.create_task(watch())
    await play_all(runner, make_attempts(8))
    done.set()
    await watching
    return longest * 1e3


async def compare_with_bare_engine(
    model: Path, tokenizer: TransformersTokenizer, pairs: int
) -> dict[str, Any]:
    """Return by turn length the CPU of the loop over that of the bare engine's client; for the
    shortest also over that of `LLM.generate`."""
    config = PolicyConfig(model=str(model), dtype="float32", max_model_len=2048)
    settings, served = EngineConfig(device="cpu", max_num_seqs=ATTEMPTS), serve_policy(config)
    found: dict[str, Any] = {}
    at_once: list[Any] = []
    looped_at: dict[int, float] = {}
    engine = await BareEngine.start_engine(settings, served)
    try:
        with tempfile.TemporaryDirectory() as folder:
            await publish(engine, config, Path(folder))
            freeze_loaded_objects()
            for tokens in TURN_TOKENS:
                calling = CallingEngine(engine, make_turn(tokenizer, tokens))
                looped, bare = await measure_pairs(calling, tokenizer, pairs)
                found |= describe_pairs(tokens, looped, bare)
                looped_at[tokens] = statistics.median(looped)
                salt = uuid.uuid4().hex
                requests = [one for several in calling.requests.values() for one in several]
                at_once.append([engine.make_bare_request(one, salt) for one in requests])
    finally:
        await engine.close()
    generated = time_at_once(engine_options(settings, served), at_once[0])
    return found | {"cpu_over_llm_generate": looped_at[TURN_TOKENS[0]] / generated}


async def measure_pairs(
    calling: CallingEngine, tokenizer: TransformersTokenizer, pairs: int
) -> tuple[list[float], list[float]]:
    """Return the CPU seconds of the loop and of the bare client, pair by pair."""
    runner = make_runner(calling, ReadyEnvironment(), tokenizer, tokens=len(calling.turn))
    looped, bare = list[float](), list[float]()
    for _ in range(pairs + 1):
        calling.requests.clear()
        looped.append(await play_all(runner, make_attempts(ATTEMPTS)))
        bare.append(await calling.engine.ask_bare(list(calling.requests.values())))
        assert all(len(requests) == TURNS for requests in calling.requests.values())
    # The first pair warms up.
    return looped[1:], bare[1:]


def time_at_once(options: dict[str, Any], requests: list[tuple[Any, Any]]) -> float:
    """Return the CPU seconds of `LLM.generate` for all requests at once, which no loop can do."""
    from vllm import LLM

    # As for the loop, the model runs in another process, which does not count.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    llm = LLM(**options)
    prompts, params = map(list, zip(*requests, strict=True))
    costs: list[float] = []
    for _ in range(3):
        salt, began = uuid.uuid4().hex, time.process_time()
        salted: list[Any] = [{**prompt, "cache_salt": salt} for prompt in prompts]
        llm.generate(salted, params, use_tqdm=False)
        costs.append(time.process_time() - began)
    return statistics.median(costs)


def describe_pairs(tokens: int, looped: list[float], bare: list[float]) -> dict[str, Any]:
    ratios = [one / other for one, other in zip(looped, bare, strict=True)]
    return {
        f"cpu_over_async_llm_at_{tokens}": statistics.median(ratios),
        f"cpu_over_async_llm_at_{tokens}_all": [round(ratio, 3) for ratio in ratios],
        f"async_llm_us_per_turn_at_{tokens}": statistics.median(bare) / ATTEMPTS / TURNS * 1e6,
    }


async def publish(engine: VllmEngine, config: PolicyConfig, folder: Path) -> None:
    policy = load_policy(config, RankConfig())
    slots = WeightSlots(policy.named_parameters(), policy.compute_dtype, folder, "bench")
    path, fingerprint, manifest = slots.write_version(0)
    await engine.load_weights(
        Publication(
            policy=PolicyId(1, 0, fingerprint),
            manifest=manifest,
            total_bytes=slots.total_bytes,
            transport="shm",
            location=str(path),
            canary_token_ids=np.zeros(0, np.int32),
            timeout_s=60.0,
        ),
        path,
    )


if __name__ == "__main__":
    main()
