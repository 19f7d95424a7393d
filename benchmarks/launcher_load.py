"""Waits of a launcher's callers: `python -m benchmarks.launcher_load [--callers 100]`.

One launcher (a process of its own) has a run of fakes. All callers are in this process, so the
figures include their waits for each other. A single caller calls GetRun and sends heartbeats, first
alone, then while `--callers` others call GetRun all the time and as many followers read the
learner's growing log. The last line is one JSON object:

- `get_p50_ms`, `get_p99_ms`, `beat_p50_ms`, `beat_p99_ms`: waits of the single caller under load;
  with the prefix `alone_`, without load.
- `get_p50_ratio`, `get_p99_ratio`, `beat_p50_ratio`, `beat_p99_ratio`: the former over the latter.
- `crowd_p50_ms`, `crowd_p99_ms`, `crowd_per_second`: GetRun as seen by the other callers.
- `lines`: lines received by each follower; `missed`: followers that missed a line or got one twice.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flotilla.launcher.v1 import registry_service_pb2 as registry_pb
from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla.launcher.v1.registry_service_pb2_grpc import RegistryServiceStub
from flotilla.launcher.v1.run_service_pb2_grpc import RunServiceStub
from flotilla_common.rpc import rpc
from flotilla_launcher.security import certificates, launcher_address
from flotilla_launcher.store.ledger import Ledger
from tests.support.launcher import spec

ROOT = Path(__file__).parents[1]
CALLS = 100
LINE = "x" * 120
LINES_PER_S = 20
DEADLINE_S = 60.0

Call = Callable[[], Awaitable[None]]


@dataclass
class Bench:
    """Running launcher and one of its runs."""

    runs: Path
    address: launcher_address.LauncherAddress
    stub: Any
    run_id: str = ""
    waited: dict[str, list[float]] = field(default_factory=dict[str, list[float]])

    async def timed(self, name: str, call: Call) -> None:
        started = time.perf_counter()
        await call()
        self.waited.setdefault(name, []).append(1e3 * (time.perf_counter() - started))

    def figures(self, name: str) -> dict[str, float]:
        cuts = statistics.quantiles(self.waited[name], n=100)
        return {f"{name}_p50_ms": cuts[49], f"{name}_p99_ms": cuts[98]}


@asynccontextmanager
async def run_launcher() -> AsyncGenerator[Bench]:
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "flotilla_launcher", "--runs", folder),
            cwd=ROOT,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            address = await asyncio.to_thread(address_of, runs)
            async with rpc.channel(address.address, token=address.token) as channel:
                bench = Bench(runs, address, RunServiceStub(channel))
                await begin_run(bench)
                yield bench
        finally:
            process.terminate()
            await process.wait()


def address_of(runs: Path) -> launcher_address.LauncherAddress:
    deadline = time.monotonic() + DEADLINE_S
    while (address := launcher_address.read_address(runs)) is None:
        if time.monotonic() > deadline:
            raise RuntimeError("the launcher does not serve")
        time.sleep(0.05)
    return address


async def begin_run(bench: Bench) -> None:
    wish = spec(learner={"steps": 1_000_000, "step_s": 1.0})
    request = pb.StartRunRequest(request_id="benchmark", spec_json=json.dumps(wish))
    bench.run_id = (await bench.stub.StartRun(request, timeout=DEADLINE_S)).run_id
    state = pb.RUN_STATE_UNSPECIFIED
    while state != pb.RUN_STATE_RUNNING:
        await asyncio.sleep(0.1)
        answer = await bench.stub.GetRun(pb.GetRunRequest(run_id=bench.run_id), timeout=DEADLINE_S)
        state = answer.run.state


@asynccontextmanager
async def open_heartbeat(bench: Bench) -> AsyncGenerator[Call]:
    """Send heartbeats to the run's registry, like a rollout started by hand."""
    member, store = (
        certificates.load_identity(bench.runs, bench.run_id),
        Ledger(bench.runs / "launcher.sqlite"),
    )
    stored = store.get_run(bench.run_id)
    store.close()
    assert member is not None and stored is not None
    who: dict[str, Any] = {"run_id": bench.run_id, "service": "rollout", "replica": 9}
    who["incarnation"] = "benchmark"
    async with rpc.channel(stored.registry, token=member.token) as channel:
        stub: Any = RegistryServiceStub(channel)
        await stub.Register(registry_pb.RegisterRequest(**who, address="127.0.0.1:9"))

        async def beat() -> None:
            await stub.Heartbeat(registry_pb.HeartbeatRequest(**who), timeout=DEADLINE_S)

        yield beat


def make_getter(bench: Bench) -> Call:
    async def get() -> None:
        await bench.stub.GetRun(pb.GetRunRequest(run_id=bench.run_id), timeout=DEADLINE_S)

    return get


async def time_single(bench: Bench, beat: Call, prefix: str) -> None:
    get = make_getter(bench)
    for _ in range(CALLS):
        await bench.timed(f"{prefix}get", get)
        await bench.timed(f"{prefix}beat", beat)


async def call_crowd(bench: Bench, done: asyncio.Event) -> None:
    get = make_getter(bench)
    while not done.is_set():
        await bench.timed("crowd", get)


async def follow_log(bench: Bench) -> list[str]:
    request = pb.TailLogsRequest(run_id=bench.run_id, service="learner", follow=True)
    request.after_bytes["learner-0"] = 0
    stream = bench.stub.TailLogs(request, timeout=10 * DEADLINE_S)
    return [line.line async for line in stream if line.line.startswith(LINE)]


async def write_lines(log: Path, done: asyncio.Event) -> list[str]:
    """Write lines at a steady rate, like a busy service."""
    lines: list[str] = []
    while not done.is_set():
        new = [f"{LINE} {len(lines) + number}" for number in range(LINES_PER_S // 10)]
        with log.open("a") as file:
            file.write("".join(f"{line}\n" for line in new))
        lines += new
        await asyncio.sleep(0.1)
    return lines


async def measure_load(callers: int) -> dict[str, float]:
    async with run_launcher() as bench, open_heartbeat(bench) as beat:
        await time_single(bench, beat, "alone_")
        done = asyncio.Event()
        log = bench.runs / bench.run_id / "logs" / "learner-0.log"
        followers = [asyncio.create_task(follow_log(bench)) for _ in range(callers)]
        crowd = [asyncio.create_task(call_crowd(bench, done)) for _ in range(callers)]
        writing = asyncio.create_task(write_lines(log, done))
        started = time.perf_counter()
        await time_single(bench, beat, "")
        seconds = time.perf_counter() - started
        done.set()
        lines = await writing
        await asyncio.gather(*crowd)
        await bench.stub.StopRun(pb.StopRunRequest(run_id=bench.run_id), timeout=DEADLINE_S)
        missed = sum([got != lines for got in await asyncio.gather(*followers)])
    rate = len(bench.waited["crowd"]) / seconds
    return {**get_figures(bench), "crowd_per_second": rate, "lines": len(lines), "missed": missed}


def get_figures(bench: Bench) -> dict[str, float]:
    names = ("alone_get", "get", "alone_beat", "beat", "crowd")
    found = {key: value for name in names for key, value in bench.figures(name).items()}
    ratios = {
        f"{name}_{cut}_ratio": found[f"{name}_{cut}_ms"] / found[f"alone_{name}_{cut}_ms"]
        for name in ("get", "beat")
        for cut in ("p50", "p99")
    }
    return {**found, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description="Waits of a launcher's callers.")
    parser.add_argument("--callers", type=int, default=100, help="of each kind, at once")
    given = parser.parse_args()
    if given.callers < 1:
        parser.error("--callers must be at least 1")
    found = asyncio.run(measure_load(given.callers))
    print(json.dumps({name: round(value, 3) for name, value in found.items()}))


if __name__ == "__main__":
    main()
