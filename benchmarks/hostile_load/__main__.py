"""Cost of attackers for legitimate clients: `python -m benchmarks.hostile_load [--scale 1]`.

Measures GetStatus of a learner and a gateway, each in a process of its own, first without load and
then while a further process holds 2,500 idle connections, 1,000 silent calls with the token, 2,500
unread watches, 200 unfinished submissions, and 400 calls without a token whose message is
incomplete. Then MCP servers over stdio write without an end, to standard output and to standard
error. It ends on its own, and connects only to 127.0.0.1. The last line is one JSON object; for
`learner` and `env_gateway`:

- `quiet_p50_ms`, `quiet_p99_ms`, `p50_ms`, `p99_ms`: time of GetStatus without and under load.
- `p99_ratio`: the latter over the former.
- `grown_mib`: the largest growth of the process.
- `holding`: for each attack, the number that the service held after a while; for connections, all
  that it accepted.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from flotilla.env_gateway.v1 import episode_service_pb2 as episodes_pb
from flotilla.env_gateway.v1.episode_service_pb2_grpc import EpisodeServiceStub
from flotilla.learner.v1 import group_service_pb2 as groups_pb
from flotilla.learner.v1.group_service_pb2_grpc import GroupServiceStub
from flotilla_common.rpc import rpc
from tests.support.learner import TOKEN

ROOT = Path(__file__).parents[2]
CALLS = 500
PAUSE_S = 0.005
DEADLINE_S = 60.0
FLOODING_EPISODES, FLOOD_S = 10, 3.0


@dataclass(frozen=True)
class Service:
    """Serving process."""

    name: str
    address: str
    process: asyncio.subprocess.Process

    @property
    def resident_mib(self) -> float:
        return self._read_memory("VmRSS")

    @property
    def largest_mib(self) -> float:
        return self._read_memory("VmHWM")

    def _read_memory(self, name: str) -> float:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        [line] = [line for line in lines if line.startswith(f"{name}:")]
        return int(line.split()[1]) / 1024


async def start_process(*arguments: str, **options: Any) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *arguments), cwd=ROOT, limit=2**20, **options
    )


@asynccontextmanager
async def learner(folder: Path) -> AsyncGenerator[Service]:
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    running = await start_process(
        "benchmarks.hostile_load.learner", str(folder), stdout=pipe, stderr=null
    )
    try:
        assert running.stdout is not None
        line = await asyncio.wait_for(running.stdout.readline(), DEADLINE_S)
        yield Service("learner", json.loads(line)["address"], running)
    finally:
        running.kill()
        await running.wait()


@asynccontextmanager
async def env_gateway(folder: Path) -> AsyncGenerator[Service]:
    policy = {"model": "none", "dtype": "float32", "max_model_len": 1024}
    spec = {"name": "benchmark", "policy": policy, "env_gateway": {"backend": "embedded"}}
    (folder / "spec.json").write_text(json.dumps(spec))
    running = await start_process(
        *("flotilla_env_gateway", "--config", str(folder / "spec.json")),
        *("--run-dir", str(folder / "run")),
        env={**os.environ, "FLOTILLA_TOKEN": TOKEN},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield Service(
            "env_gateway", await asyncio.wait_for(_read_line(running), DEADLINE_S), running
        )
    finally:
        running.kill()
        await running.wait()


async def _read_line(running: asyncio.subprocess.Process) -> str:
    assert running.stderr is not None
    async for line in running.stderr:
        if (event := json.loads(line)).get("event") == "serving":
            return event["address"]
    raise RuntimeError("the gateway ended before it served")


async def measure_waits(service: Service, calls: int) -> list[float]:
    """Return the times of several GetStatus calls, in ms."""
    found: list[float] = []
    async with rpc.channel(service.address, token=TOKEN) as channel:
        stub, request = _status_call(service, channel)
        for _ in range(calls):
            started = time.perf_counter()
            await stub.GetStatus(request, timeout=DEADLINE_S)
            found.append(1e3 * (time.perf_counter() - started))
            await asyncio.sleep(PAUSE_S)
    return found


def _status_call(service: Service, channel: grpc.aio.Channel) -> tuple[Any, Any]:
    if service.name == "learner":
        return GroupServiceStub(channel), groups_pb.GetStatusRequest()
    return EpisodeServiceStub(channel), episodes_pb.GetStatusRequest()


@asynccontextmanager
async def run_strangers(service: Service, scale: float) -> AsyncGenerator[dict[str, int]]:
    pipe = asyncio.subprocess.PIPE
    attacking = await start_process(
        *("benchmarks.hostile_load.attacks", service.name, service.address, str(scale)),
        stdin=pipe,
        stdout=pipe,
    )
    try:
        assert attacking.stdout is not None
        line = await asyncio.wait_for(attacking.stdout.readline(), DEADLINE_S)
        yield json.loads(line)["holding"]
    finally:
        attacking.kill()
        await attacking.wait()


async def measure_service(service: Service, scale: float, calls: int) -> dict[str, Any]:
    await measure_waits(service, 50)
    before, quiet = service.resident_mib, await measure_waits(service, calls)
    async with run_strangers(service, scale) as holding:
        loaded = await measure_waits(service, calls)
        grown = service.largest_mib - before
    figures: dict[str, Any] = {"holding": holding, "grown_mib": round(grown, 1)}
    for prefix, found in (("quiet_", quiet), ("", loaded)):
        cuts = statistics.quantiles(found, n=100)
        figures |= {f"{prefix}p50_ms": round(cuts[49], 2), f"{prefix}p99_ms": round(cuts[98], 2)}
    figures["p99_ratio"] = round(figures["p99_ms"] / figures["quiet_p99_ms"], 2)
    return figures


async def measure_stdio_floods(scale: float) -> dict[str, Any]:
    episodes = max(1, int(FLOODING_EPISODES * scale))
    measuring = await start_process(
        *("benchmarks.hostile_load.stdio_floods", str(episodes), str(FLOOD_S)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    output, _ = await measuring.communicate()
    return json.loads(output.splitlines()[-1])


async def run_bench(scale: float, calls: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for serve in (learner, env_gateway):
        with tempfile.TemporaryDirectory() as folder:
            async with serve(Path(folder)) as service:
                figures[service.name] = await measure_service(service, scale, calls)
        print(service.name, json.dumps(figures[service.name]), flush=True)
    return {**figures, "stdio_floods": await measure_stdio_floods(scale)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--scale", type=float, default=1.0, help="scale of each attack (default: 1)"
    )
    parser.add_argument("--calls", type=int, default=CALLS, help=f"of GetStatus (default: {CALLS})")
    given = parser.parse_args()
    print(json.dumps(asyncio.run(run_bench(given.scale, given.calls))))


if __name__ == "__main__":
    main()
