"""Load of one learner with 10,000 attempts in flight: `python -m benchmarks.in_flight`.

Workers, each with its own clients and channel, lease groups until that many attempts are in flight,
renew their leases, and submit trajectories of 2,000 tokens. Each attempt takes two minutes, so that
about 80 end per second, and as many begin. The learner, in a process of its own, journals all of it
and trains in between. The last line is one JSON object, over a minute of the steady state:

- `cores`: CPU of the learner, in cores; `memory_mb`: its resident memory, and that before the load.
- `lag_ms`: longest blockage of its event loop in each second: median and worst.
- `trajectories_per_s`, and `in_flight`, the attempts in flight at the end.

About 5 minutes.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.replica import AgreeingEngine, Replica, connect_replica, written_for
from benchmarks.submission import make_trajectory
from benchmarks.timed_learner import TimedLearner, run_timed_learner
from flotilla_common.aio.concurrency import cancel_tasks, running_tasks
from flotilla_common.telemetry import log
from flotilla_rollout.ports import LeaseLost
from flotilla_rollout.types import Lease

ATTEMPTS, GROUP, WORKERS = 10_000, 8, 16
ATTEMPT_S, WATCHED_S = 120.0, 60.0
RENEW_S = 20.0
TRAJECTORY = make_trajectory(2_000)


@dataclass
class Flight:
    """Counts of attempts in flight and of accepted trajectories."""

    running: int = 0
    taken: int = 0
    lost: int = 0
    leases: set[str] = field(default_factory=set[str])


class InFlightWorker:
    """Worker that simulates attempts by waiting."""

    def __init__(
        self, replica: Replica, engine: AgreeingEngine, flight: Flight, most: int, attempt_s: float
    ) -> None:
        self._replica = replica
        self._engine = engine
        self._flight = flight
        self._most = most
        self._attempt_s = attempt_s
        self._running = 0
        self._leases: set[str] = set()
        self._groups: set[asyncio.Task[None]] = set()

    async def keep_working(self) -> None:
        await self._replica.follower.wait_for_first_weights()
        try:
            async with running_tasks(self._keep_renewing(), self._keep_leasing()) as tasks:
                await asyncio.gather(*tasks)
        finally:
            await cancel_tasks(self._groups)

    async def _keep_renewing(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            if self._leases:
                await self._replica.groups.renew_leases(list(self._leases))

    async def _keep_leasing(self) -> None:
        while True:
            free = self._most - self._running
            policy = self._engine.policy
            lease = None
            if free >= GROUP and policy is not None:
                lease = await self._replica.groups.lease_group(policy, free)
            if lease is None:
                await asyncio.sleep(0.1)
            else:
                group = asyncio.create_task(self._play_group(lease))
                self._groups.add(group)
                group.add_done_callback(self._groups.discard)

    async def _play_group(self, lease: Lease) -> None:
        self._leases.add(lease.lease_id)
        self._count(len(lease.attempts))
        try:
            await asyncio.gather(*(self._play(lease, a.attempt_index) for a in lease.attempts))
        finally:
            self._leases.discard(lease.lease_id)

    async def _play(self, lease: Lease, index: int) -> None:
        policy = self._engine.policy
        assert policy is not None
        try:
            await asyncio.sleep(self._attempt_s * random.uniform(0.5, 1.5))
            made = written_for(TRAJECTORY, lease, index, policy)
            await self._replica.groups.submit_trajectory(lease, made, 60.0)
            self._flight.taken += 1
        except LeaseLost:
            self._flight.lost += 1
        finally:
            self._count(-1)

    def _count(self, attempts: int) -> None:
        self._running += attempts
        self._flight.running += attempts


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--attempts", type=int, default=ATTEMPTS)
    parser.add_argument("--attempt-seconds", type=float, default=ATTEMPT_S)
    parser.add_argument("--watch-seconds", type=float, default=WATCHED_S)
    given = parser.parse_args()
    log.setup("benchmark", "", level="ERROR")
    print(
        json.dumps(asyncio.run(measure(given.attempts, given.attempt_seconds, given.watch_seconds)))
    )


async def measure(attempts: int, attempt_s: float, watched_s: float) -> dict[str, Any]:
    """Return the load of a learner in the steady state."""
    async with steady_learner(attempts, attempt_s) as (learner, flight, _):
        taken, began = flight.taken, time.monotonic()
        await asyncio.sleep(watched_s)
        seconds = time.monotonic() - began
        rate = (flight.taken - taken) / seconds
        return {"trajectories_per_s": round(rate, 1), **summarise(learner, flight, began)}


@asynccontextmanager
async def steady_learner(
    attempts: int, attempt_s: float
) -> AsyncGenerator[tuple[TimedLearner, Flight, Path]]:
    """Run a learner with `attempts` in flight, and yield it in the steady state, with its folder
    of runs."""
    # More leases than workers take, so that each ended attempt is followed by another at once.
    changes: dict[str, Any] = {
        **{"steps": 10_000, "groups_per_step": attempts // GROUP // 4, "group_size": GROUP},
        **{"max_staleness": 7, "lease_ttl_s": 90.0, "checkpoint": {"every": 10_000}},
    }
    flight = Flight()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        async with (
            run_timed_learner(folder, 1.0, **changes) as learner,
            AsyncExitStack() as stack,
        ):
            workers = [
                await make_worker(stack, learner, folder, number, flight, attempts, attempt_s)
                for number in range(WORKERS)
            ]
            async with running_tasks(*(worker.keep_working() for worker in workers)):
                await wait_until_steady(flight, attempts, attempt_s)
                yield learner, flight, folder


async def make_worker(
    stack: AsyncExitStack,
    learner: TimedLearner,
    folder: Path,
    number: int,
    flight: Flight,
    attempts: int,
    attempt_s: float,
) -> InFlightWorker:
    engine = AgreeingEngine()
    connected = connect_replica(learner.address, folder, number, engine)
    replica = await stack.enter_async_context(connected)
    return InFlightWorker(replica, engine, flight, attempts // WORKERS, attempt_s)


async def wait_until_steady(flight: Flight, attempts: int, attempt_s: float) -> None:
    # Polled: the counting tasks do not signal waiters.
    while flight.running < 0.9 * attempts:  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    await asyncio.sleep(attempt_s)


def summarise(learner: TimedLearner, flight: Flight, began: float) -> dict[str, Any]:
    samples = [sample for sample in learner.samples if sample.at >= began]
    lags = [sample.lag_s * 1e3 for sample in samples]
    first, last = samples[0], samples[-1]
    return {
        "cores": round((last.cpu_s - first.cpu_s) / (last.at - first.at), 3),
        "memory_mb": [round(each.memory / 1e6) for each in (learner.samples[0], last)],
        "lag_ms": [round(statistics.median(lags), 1), round(max(lags), 1)],
        "in_flight": flight.running,
        "lost": flight.lost,
        "load": os.getloadavg()[0],
    }


if __name__ == "__main__":
    main()
