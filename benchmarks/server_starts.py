"""Opening of episodes whose MCP servers are processes: `python -m benchmarks.server_starts`.

The public servers of files and of git (`make mcp-servers`) are the tools of every episode, in one
folder with a copy of a small repository. `--attempts` episodes are opened concurrently, through a
gateway process and the rollout workers' client: with servers that start then, and with as many
started ahead. The last line is one JSON object:

- `start_s`, `start_cpu_s`, `start_mib`: cost of starting both servers of one episode, alone.
- `cold_p50_s`, `warm_p50_s`, `cold_max_s`, `warm_max_s`: from request to READY, of all rounds.
- `fill_s`: until the pool is full at first; `refill_s`: again after a burst, whose servers are
  given back.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gateway_call import ROOT, TOKEN, connect_worker, find_event, run_gateway
from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla.env_gateway.v1.episode_service_pb2_grpc import EpisodeServiceStub
from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.rpc import rpc
from flotilla_rollout.adapters.env_gateway import GatewayEnvironment
from flotilla_rollout.types import OpenRequest

_INSTALLED = ROOT / "build/mcp-servers"
_FILES = "node_modules/@modelcontextprotocol/server-filesystem/dist/index.js"
TASK = {"key": "look", "env_id": "office", "prompt": "Look around."}


def list_servers(template: Path) -> list[dict[str, Any]]:
    """Return the tables of the servers of files and of git, in a folder that begins as `template`,
    which receives a repository."""
    for words in (
        ("init", "-q", "-b", "main"),
        ("config", "user.name", "Ann"),
        ("config", "user.email", "ann@example.com"),
        ("commit", "-q", "--allow-empty", "-m", "Begin"),
    ):
        subprocess.run(("git", *words), cwd=template, check=True)
    node = str(_INSTALLED / "node_modules/.bin/node")
    commands = {
        "files": [node, str(_INSTALLED / _FILES), "{episode_dir}"],
        "git": [str(_INSTALLED / "mcp2/bin/mcp-server-git"), "--repository", "{episode_dir}"],
    }
    if not Path(commands["git"][0]).exists():
        raise SystemExit("the servers are not installed: make mcp-servers")
    shared = {
        "transport": "stdio",
        "task_variables": False,
        "state_in_folder": True,
        "template": str(template),
    }
    return [{"name": name, "command": words, **shared} for name, words in commands.items()]


def make_section(folder: Path, size: int) -> dict[str, Any]:
    """Return the section of a gateway that starts `size` episodes' servers ahead."""
    template = folder / "template"
    template.mkdir()
    return {
        "backend": "mcp",
        "servers": list_servers(template),
        "environments": {"office": {"servers": ["files", "git"]}},
        "warm_starts": {"size": size, "starts_per_s": 100.0},
        "open_timeout_s": 600.0,
    }


async def open_burst(address: str, attempts: int, number: int) -> list[float]:
    """Open episodes concurrently and close them; return the seconds that each opening took."""
    seconds: list[float] = []
    everybody = asyncio.Barrier(attempts)

    async def open_one(environment: GatewayEnvironment, attempt: int) -> None:
        key = AttemptKey(f"burst-{number}", attempt, 0)
        started = time.perf_counter()
        request = OpenRequest(key, json.dumps(TASK), opening=1, budget_s=900.0)
        async with environment.open_episode(request):
            seconds.append(time.perf_counter() - started)
            await everybody.wait()

    async with connect_worker(address) as environment:
        await asyncio.gather(*(open_one(environment, attempt) for attempt in range(attempts)))
    return seconds


async def wait_until_full(address: str, size: int) -> float:
    """Wait until so many episodes' servers are ready; return the seconds."""
    started = time.perf_counter()
    async with rpc.channel(address, token=TOKEN) as channel:
        stub: Any = EpisodeServiceStub(channel)
        while True:
            status = await stub.GetStatus(pb.GetStatusRequest(), timeout=60.0)
            if any(
                each.name == "warm_servers" and each.in_flight == size for each in status.limiters
            ):
                return time.perf_counter() - started
            await asyncio.sleep(0.05)


def measure_bursts(attempts: int, rounds: int, *, warm: bool) -> dict[str, float]:
    name, seconds, refills = "warm" if warm else "cold", [], []
    with tempfile.TemporaryDirectory() as folder:
        size = attempts if warm else 0
        section = make_section(Path(folder), size)
        with run_gateway(Path(folder), section) as gateway:
            address = gateway.address
            if not warm:
                asyncio.run(open_burst(address, 1, rounds))
            for number in range(rounds):
                if warm:
                    refills.append(asyncio.run(wait_until_full(address, size)))
                seconds += asyncio.run(open_burst(address, attempts, number))
                print(f"{name} round {number + 1} of {rounds}", file=sys.stderr)
            start = find_event(gateway.log, "servers_started")
    figures = {f"{name}_p50_s": statistics.median(seconds), f"{name}_max_s": max(seconds)}
    if warm:
        return {**figures, "fill_s": refills[0], "refill_s": statistics.median(refills[1:])}
    cost = {"start_s": start["seconds"], "start_cpu_s": start["cpu_s"], "start_mib": start["mib"]}
    return {**figures, **cost}


def main() -> None:
    parser = argparse.ArgumentParser(description="Opening of episodes with servers over stdio.")
    parser.add_argument("--attempts", type=int, default=32, help="episodes at once")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if given.attempts < 1 or given.rounds < 2:
        parser.error("--attempts must be at least 1, --rounds at least 2")
    figures = {
        **measure_bursts(given.attempts, given.rounds, warm=False),
        **measure_bursts(given.attempts, given.rounds, warm=True),
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
