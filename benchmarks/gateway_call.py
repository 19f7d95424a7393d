"""Cost of a tool call: `python -m benchmarks.gateway_call [--episodes 16]`.

One MCP server (`flotilla_environments.serve`, a process of its own) answers the same look-up in
three ways, in turns: through a gateway process and the rollout workers' client; through the
official `mcp` client with one open session per episode; and through that client with a new
connection for each call. The CPU time covers all threads of the client and, if there is one, the
gateway, but not the server. The last line is one JSON object:

- `gateway_ms`, `persistent_ms`, `reconnect_ms`: CPU milliseconds per call, of all rounds together;
  `gateway_client_ms` and `gateway_process_ms` are the two parts of the first.
- `gateway_seconds`, `persistent_seconds`, `reconnect_seconds`: from a call to its answer, medians.
- `reconnect_ratio`, `persistent_ratio`: their cost over that of the gateway.
"""

import argparse
import asyncio
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from mcp import Client

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.rpc import rpc
from flotilla_environments.reference_policies import plan_calls
from flotilla_environments.tasks import make_task
from flotilla_rollout.adapters.env_gateway import GatewayEnvironment
from flotilla_rollout.types import OpenRequest

ROOT = Path(__file__).parents[1]
ROUNDS = 15
# Connecting costs so much that fewer calls suffice.
CALLS_PER_RECONNECT = 5
TOKEN = "benchmark-token-0123456789"
# Of a gateway.
ENVIRONMENT = {**os.environ, "FLOTILLA_TOKEN": TOKEN}
TASK = make_task("booking", "train", 0)
NAME, ARGUMENTS = plan_calls(TASK)[0]

Call = Callable[[], Awaitable[None]]


@dataclass
class Cost:
    """CPU meter of this process and of `others`, processes that work for it."""

    others: Sequence[int] = ()
    client_s: float = 0.0
    others_s: float = 0.0
    seconds: list[float] = field(default_factory=list[float])

    async def measure(self, calls: Sequence[Call], each: int) -> None:
        """Repeat each of `calls` in a row, all of them concurrently."""

        async def repeat(call: Call) -> None:
            for _ in range(each):
                started = time.perf_counter()
                await call()
                self.seconds.append(time.perf_counter() - started)

        client_s, others_s = time.process_time(), self._others_s()
        await asyncio.gather(*(repeat(call) for call in calls))
        self.client_s += time.process_time() - client_s
        self.others_s += self._others_s() - others_s

    def ms(self, seconds: float) -> float:
        return 1e3 * seconds / len(self.seconds)

    def _others_s(self) -> float:
        return sum(map(cpu_s, self.others))


def cpu_s(pid: int) -> float:
    """Return the CPU time of all threads of another process, by its Linux clock."""
    return time.clock_gettime(~pid << 3 | 2)


@contextmanager
def run_process(
    command: Sequence[str],
    *,
    stdout: int | None = None,
    stderr: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Generator[subprocess.Popen[bytes]]:
    """Run a process until the block ends."""
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr, env=environment
    ) as process:
        try:
            yield process
        finally:
            process.terminate()


@contextmanager
def run_mcp_server(module: str = "flotilla_environments.serve", *arguments: str) -> Generator[str]:
    """Run a server that prints its URL; yield that."""
    command = [sys.executable, "-m", module, "--die-with-parent", *arguments]
    with run_process(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]


@dataclass(frozen=True)
class Gateway:
    """A gateway's process, with its address and log."""

    process: subprocess.Popen[bytes]
    address: str
    log: Path


@contextmanager
def run_gateway(
    folder: Path, section: Mapping[str, Any], environment: Mapping[str, str] = ENVIRONMENT
) -> Generator[Gateway]:
    """Run a gateway with this section of its spec, and its files in `folder`."""
    policy = {"model": "none", "dtype": "float32", "max_model_len": 1024}
    spec, log = folder / "spec.json", folder / "log"
    spec.write_text(json.dumps({"name": "benchmark", "policy": policy, "env_gateway": section}))
    command = [sys.executable, "-m", "flotilla_env_gateway", "--config", str(spec)]
    command += ["--run-dir", str(folder / "run")]
    with (
        log.open("w") as output,
        run_process(command, stderr=output.fileno(), environment=environment) as process,
    ):
        while "address" not in (serving := find_event(log, "serving")):
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.1)
        yield Gateway(process, serving["address"], log)


def find_event(log: Path, event: str) -> dict[str, Any]:
    """Return the first event of that name in a gateway's log; empty if there is none."""
    for line in log.read_text().splitlines():
        if f'"{event}"' in line and (found := json.loads(line))["event"] == event:
            return found
    return {}


@asynccontextmanager
async def connect_worker(address: str) -> AsyncGenerator[GatewayEnvironment]:
    """Yield the rollout workers' client of a gateway, which renews its episodes."""
    async with rpc.channel(address, token=TOKEN) as channel:
        environment = GatewayEnvironment(
            channel, run_id="benchmark", worker_id="benchmark", renew_interval_s=15.0
        )
        renewing = asyncio.create_task(environment.keep_renewing())
        try:
            yield environment
            await environment.wait_until_closed()
        finally:
            renewing.cancel()


def make_section(url: str) -> dict[str, Any]:
    """Return the section of a gateway whose environments are instances at the server."""
    return {"backend": "mcp", "servers": [{"url": url, "instances": True}]}


@asynccontextmanager
async def gateway_calls(address: str, episodes: int) -> AsyncGenerator[list[Call]]:
    async with AsyncExitStack() as stack:
        environment = await stack.enter_async_context(connect_worker(address))
        yield [
            await _gateway_call(stack, environment, attempt, episodes)
            for attempt in range(episodes)
        ]


async def _gateway_call(
    stack: AsyncExitStack, environment: GatewayEnvironment, attempt: int, episodes: int
) -> Call:
    key = AttemptKey("benchmark", attempt, 0)
    request = OpenRequest(key, json.dumps(TASK), opening=1, budget_s=600.0)
    episode = await stack.enter_async_context(environment.open_episode(request))
    arguments = json.dumps(ARGUMENTS)

    async def call() -> None:
        result = await episode.call_tool(NAME, arguments, 30.0)
        assert result.outcome == "ok", result

    return call


@asynccontextmanager
async def open_instances(url: str, count: int) -> AsyncGenerator[list[str]]:
    """Yield the addresses of new environments at the server."""
    wanted = {"env_key": TASK["env_id"], "data_key": TASK["data_id"], "run_id": "sdk"}
    async with aiohttp.ClientSession(raise_for_status=True) as http:
        urls: list[str] = []
        for _ in range(count):
            async with http.post(f"{url}/v1/env/instances", json=wanted) as answer:
                urls.append((await answer.json())["urls"]["root"] + "mcp")
        yield urls
        await http.delete(f"{url}/v1/env/instances/batch?run_id=sdk")


async def _call_once(client: Client) -> None:
    result = await client.call_tool(NAME, ARGUMENTS)
    assert not result.is_error, result


def persistent_call(client: Client) -> Call:
    return lambda: _call_once(client)


def reconnecting_call(url: str) -> Call:
    async def call() -> None:
        async with Client(url) as client:
            await _call_once(client)

    return call


async def measure_costs(
    calls: int, episodes: int, url: str, pid: int, address: str
) -> dict[str, Cost]:
    costs = {"gateway": Cost((pid,)), "persistent": Cost(), "reconnect": Cost()}
    async with AsyncExitStack() as stack:
        urls = await stack.enter_async_context(open_instances(url, episodes))
        clients = [await stack.enter_async_context(Client(one)) for one in urls]
        ways = {
            "gateway": await stack.enter_async_context(gateway_calls(address, episodes)),
            "persistent": [persistent_call(client) for client in clients],
            "reconnect": [reconnecting_call(one) for one in urls],
        }
        each = {"gateway": calls, "persistent": calls, "reconnect": calls // CALLS_PER_RECONNECT}
        for way, made in ways.items():
            await Cost().measure(made, max(5, each[way] // 10))
        for number in range(ROUNDS):
            for way, cost in costs.items():
                await cost.measure(ways[way], each[way])
            print(f"round {number + 1} of {ROUNDS}", file=sys.stderr)
    return costs


def compute_figures(costs: dict[str, Cost]) -> dict[str, float]:
    total = {way: cost.ms(cost.client_s + cost.others_s) for way, cost in costs.items()}
    return {
        **{f"{way}_ms": ms for way, ms in total.items()},
        "gateway_client_ms": costs["gateway"].ms(costs["gateway"].client_s),
        "gateway_process_ms": costs["gateway"].ms(costs["gateway"].others_s),
        **{f"{way}_seconds": statistics.median(cost.seconds) for way, cost in costs.items()},
        **{f"{way}_ratio": total[way] / total["gateway"] for way in ("reconnect", "persistent")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of a tool call.")
    parser.add_argument("--calls", type=int, default=20, help="calls of an episode in a round")
    parser.add_argument("--episodes", type=int, default=16, help="episodes at once")
    given = parser.parse_args()
    if given.calls < CALLS_PER_RECONNECT or given.episodes < 1:
        parser.error(f"--calls must be at least {CALLS_PER_RECONNECT}, --episodes at least 1")
    logging.disable(logging.INFO)
    with (
        run_mcp_server() as url,
        tempfile.TemporaryDirectory() as folder,
        run_gateway(Path(folder), make_section(url)) as gateway,
    ):
        pid = gateway.process.pid
        costs = asyncio.run(measure_costs(given.calls, given.episodes, url, pid, gateway.address))
    print(json.dumps({name: round(value, 4) for name, value in compute_figures(costs).items()}))


if __name__ == "__main__":
    main()
