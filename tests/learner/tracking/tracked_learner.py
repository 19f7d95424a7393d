"""A learner whose tracker, ranks and worker a test brings."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flotilla_common.process.run_membership import ReplicaIdentity, ReplicaStatus
from flotilla_common.process.service_lifecycle import Lifecycle
from flotilla_common.rpc.free_ports import free_address
from flotilla_common.weights.fingerprint import TokenizerDigests
from flotilla_learner.alarms.ports import AlarmSink
from flotilla_learner.app import run_learner
from flotilla_learner.dependencies import LearnerDependencies
from flotilla_learner.ports import Ranks, Tracker
from tests.support.fake_ranks import FakeRanks
from tests.support.learner import TOKENIZER, FakeWorker, make_config, make_runtime


async def run_with(
    tmp_path: Path,
    tracker: Tracker,
    *,
    ranks: Ranks | None = None,
    worker: type[FakeWorker] = FakeWorker,
    until: Callable[[FakeWorker], Awaitable[None]] | None = None,
    heard: AlarmSink | None = None,
    reported: Mapping[str, float] | None = None,
    statuses: list[ReplicaStatus] | None = None,
    **changes: Any,
) -> None:
    """Start a run and wait for its end, its failure, or the end of `until`; `reported` holds the
    metrics from a launcher, and `statuses` gets the last status for it."""
    changes = {"steps": 4, "checkpoint": {"every": 100}, **changes}
    address = free_address()
    runtime = make_runtime(tmp_path, make_config(tmp_path, **changes), listen=address)
    if reported is not None:
        identity = ReplicaIdentity("run", "learner", 0, "i1")
        runtime.lifecycle = Lifecycle(runtime.drain, identity, None, None)
        runtime.lifecycle.launcher_metrics = reported
    ranks = ranks or FakeRanks(tmp_path / "weights")
    sinks = [heard] if heard else []
    vendors = LearnerDependencies(ranks, tracker, TokenizerDigests(TOKENIZER), alarm_sinks=sinks)
    running = asyncio.create_task(run_learner(runtime, vendors))
    try:
        async with worker(address).working() as working:
            waiting = until(working) if until else asyncio.sleep(20)
            ended = asyncio.ensure_future(waiting)
            await asyncio.wait({running, ended}, return_when=asyncio.FIRST_COMPLETED)
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)
    finally:
        if statuses is not None and runtime.lifecycle is not None:
            statuses.append(runtime.lifecycle.status())
        running.cancel()
        tracker.close()
        with suppress(asyncio.CancelledError):
            await running
