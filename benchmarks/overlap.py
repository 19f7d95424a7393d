"""Step time over the longer of rollout and training: `python -m benchmarks.overlap`.

A learner, with its journal, serves workers over gRPC at staleness 1. Workers, their episodes and
their weight updates are real, with several replicas side by side. The work of GPUs is simulated and
takes time but no CPU: ranks train for a fixed time, and each engine writes a fixed number of tokens
a second, shared by its requests. Turns differ in length. The last line is one JSON object: for 1 to
16 replicas, and for a rollout that takes half, as much and twice the time of training,
`step_over_longest`, the median step over max(rollout, train). About 20 minutes.
"""

import argparse
import asyncio
import heapq
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.replica import AgreeingEngine, connect_replica
from benchmarks.rollout_loop import ReadyEnvironment, make_turn
from benchmarks.timed_learner import TimedLearner, run_timed_learner
from flotilla_common.aio.concurrency import run_until_first, running_tasks, wait_beside
from flotilla_common.images.picture import ShownPicture
from flotilla_common.process.loaded_objects import freeze_loaded_objects
from flotilla_common.telemetry import log
from flotilla_rollout.episodes.attempt_limits import AttemptLimits
from flotilla_rollout.episodes.episode import AttemptRunner
from flotilla_rollout.ports import EngineError
from flotilla_rollout.types import Completion, PolicySpan, Sampling
from flotilla_rollout.work.options import WorkerOptions
from flotilla_rollout.work.worker import Worker
from tests.support.rollout import dialect, tokenizer

REPLICAS, BALANCES = (1, 2, 4, 8, 16), (0.5, 1.0, 2.0)
GROUPS, GROUP, TURNS, TURN_TOKENS = 32, 4, 4, 192
# Seconds of the longer of rollout and training, counted steps, and warm-up steps.
LONGEST_S, STEPS, WARM_UP = 10.0, 6, 2
LIMITS = AttemptLimits(
    max_turns=TURNS,
    max_input_length=8_000,
    max_generate_length=4 * TURN_TOKENS,
    max_model_len=16_000,
    attempt_timeout_s=600.0,
    call_timeout_s=60.0,
    grade_timeout_s=60.0,
)


class SharedRate:
    """Token rate shared evenly by all requests, independent of delays of the event loop."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._served, self._at = 0.0, 0.0
        # Token count at which each request is done, in that order.
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._next: asyncio.TimerHandle | None = None

    async def serve(self, tokens: int) -> None:
        """Return when this request has received its tokens."""
        loop = asyncio.get_running_loop()
        self._advance(loop.time())
        done = loop.create_future()
        heapq.heappush(self._waiting, (self._served + tokens, next(self._numbers), done))
        self._plan_next(loop)
        await done

    def _advance(self, now: float) -> None:
        while self._waiting:
            ends = self._at + (self._waiting[0][0] - self._served) * self._share
            if ends > now:
                self._served += (now - self._at) / self._share
                break
            self._served, _, done = heapq.heappop(self._waiting)
            self._at = ends
            if not done.done():
                done.set_result(None)
        self._at = now

    @property
    def _share(self) -> float:
        """Return the seconds per token of each request."""
        return len(self._waiting) / self._rate

    def _plan_next(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._next is not None:
            self._next.cancel()
        if self._waiting:
            left = (self._waiting[0][0] - self._served) * self._share
            self._next = loop.call_later(left, self._wake, loop)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        self._advance(loop.time())
        self._plan_next(loop)


class RateLimitedEngine(AgreeingEngine):
    """Engine that writes one call a turn, at a limited token rate over all requests."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._decoder = SharedRate(rate)
        self._turn = make_turn(tokenizer(), 0)

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        max_tokens: int,
        timeout_s: float = inf,
        pictures: Sequence[ShownPicture] = (),
    ) -> Completion:
        began = self.policy
        if began is None:
            raise EngineError("no policy is loaded")
        length = min(turn_length(sampling.seed, len(token_ids)), max_tokens)
        await self._decoder.serve(length)
        # The call at the end, after words that fill the length.
        ids = np.concatenate([np.resize(self._turn[:1], length), self._turn])[-length:]
        first = length // 2
        spans = (PolicySpan(began, first), PolicySpan(self.policy or began, length - first))
        logprobs = np.full(length, -0.5, np.float32)
        return Completion(ids.astype(np.int32), logprobs, merge_spans(spans), cut=False)


def turn_length(seed: int, context: int) -> int:
    """Return a length between 0.5 and 1.5 of the mean, the same for every try."""
    drawn = np.random.default_rng((seed % 2**32, context)).integers(0, TURN_TOKENS + 1)
    return TURN_TOKENS // 2 + int(drawn)


def merge_spans(spans: tuple[PolicySpan, PolicySpan]) -> tuple[PolicySpan, ...]:
    first, last = spans
    if first.policy != last.policy:
        return spans
    return (PolicySpan(first.policy, first.length + last.length),)


@dataclass(frozen=True, slots=True)
class Balance:
    """Seconds of a step's training, and of its rollout with all engines together."""

    train_s: float
    rollout_s: float

    @staticmethod
    def from_ratio(rollout_over_train: float) -> "Balance":
        longer = max(rollout_over_train, 1.0)
        train_s = LONGEST_S / longer
        return Balance(train_s, train_s * rollout_over_train)

    def engine_rate(self, replicas: int) -> float:
        return GROUPS * GROUP * TURNS * TURN_TOKENS / self.rollout_s / replicas


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=REPLICAS)
    parser.add_argument("--balances", type=float, nargs="+", default=BALANCES)
    parser.add_argument("--steps", type=int, default=STEPS)
    given = parser.parse_args()
    log.setup("benchmark", "", level="ERROR")
    found: dict[str, Any] = {}
    for replicas, ratio in itertools.product(given.replicas, given.balances):
        measured = asyncio.run(measure(replicas, Balance.from_ratio(ratio), given.steps))
        found[f"{replicas} replicas, rollout {ratio:g} of train"] = measured
        print(json.dumps({"replicas": replicas, "balance": ratio, **measured}), flush=True)
    worst = max(each["step_over_longest"] for each in found.values())
    print(json.dumps({"worst": worst, "load": os.getloadavg()[0], "runs": found}))


async def measure(replicas: int, balance: Balance, steps: int) -> dict[str, float]:
    """Return the figures of one run."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        changes: dict[str, Any] = {
            "steps": 10_000,
            "groups_per_step": GROUPS,
            "group_size": GROUP,
            "max_staleness": 1,
            "lease_ttl_s": 60.0,
            "checkpoint": {"every": 10_000},
        }
        async with run_timed_learner(folder, balance.train_s, **changes) as learner:
            rate = balance.engine_rate(replicas)
            workers = [keep_working(folder, learner, n, replicas, rate) for n in range(replicas)]
            until = wait_for_steps(learner, WARM_UP + steps)
            freeze_loaded_objects()
            began, cpu_s = time.monotonic(), time.process_time()
            await run_until_first(until, *workers)
            cores = (time.process_time() - cpu_s) / (time.monotonic() - began)
            return summarise(learner.read_steps()[WARM_UP:], balance, learner, cores)


def summarise(
    rows: list[dict[str, Any]], balance: Balance, learner: TimedLearner, own_cores: float
) -> dict[str, float]:
    def median(name: str) -> float:
        return statistics.median(row[name] for row in rows)

    step, longest = median("timing/step"), max(balance.rollout_s, balance.train_s)
    found = {
        "step_over_longest": step / longest,
        "step_s": step,
        "slowest_step_s": max(row["timing/step"] for row in rows),
        "train_s": median("timing/train"),
        "rollout_s": balance.rollout_s,
        "waited_for_rollout_s": median("timing/rollout_wait"),
        "publish_s": median("timing/publish"),
        "learner_cores": learner.cores,
        "workers_cores": own_cores,
    }
    return {name: round(value, 3) for name, value in found.items()}


async def wait_for_steps(learner: TimedLearner, steps: int) -> None:
    # Polled: the learner writes the file without a signal.
    while len(learner.read_steps()) < steps:  # noqa: ASYNC110
        await asyncio.sleep(0.2)


async def keep_working(
    folder: Path, learner: TimedLearner, number: int, replicas: int, rate: float
) -> None:
    """Run one replica with its own engine, channel, worker and weight updates."""
    engine, environment = RateLimitedEngine(rate), ReadyEnvironment()
    runner = AttemptRunner(engine, environment, tokenizer(), dialect("full"), LIMITS)
    # The most that can be leased at once at staleness 1.
    most = 2 * GROUPS * GROUP // replicas
    options = WorkerOptions(most, 5.0, 1.0, LIMITS.attempt_timeout_s)
    async with connect_replica(learner.address, folder, number, engine) as replica:
        worker = Worker(
            replica.groups,
            runner,
            lambda: engine.policy,
            options,
            settled=replica.follower.wait_until_judged,
        )
        # Return its leases before its channel closes.
        async with running_tasks(worker.run_until_drained(asyncio.Event())) as (working,):
            await wait_beside(working, [replica.updating])


if __name__ == "__main__":
    main()
