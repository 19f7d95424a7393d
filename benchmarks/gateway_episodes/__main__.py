"""Thousands of episodes through one gateway: `python -m benchmarks.gateway_episodes`.

Plays `--episodes` episodes, `--concurrency` at a time, through a gateway process and the rollout
workers' client: a scripted policy opens one, calls tools, has it graded twice and closes it. Every
fourth leaves out its last call, so that the right grade of each is known. The environments are
instances at an MCP server over HTTP, or (`--servers stdio`) processes that are started ahead; both
count the calls that they execute. With `--cut-every`, all connections between client and gateway
are cut after so many seconds, again and again. The last line is one JSON object:

- `lost`: episodes without an answer or a grade, by reason; `wrong`: grades other than the right
  one; `regraded`: a second answer that differs from the first; `twice`: calls that a server
  executed again; `missed`: calls that were answered but not executed.
- `leaked`: what is left after the last episode and was not there after the first ones; `survivors`:
  processes and temporary files that outlive the gateway.
- `mib`: the gateway's memory, idle, at the start, after half of the episodes and after all of them;
  `grown_kib`: its growth per episode of the second half; `open_kib`: per open episode.
- `NAME_p50_ms` and `NAME_p95_ms`: of opening, of a call, of a grade, and of the whole episode.
- `per_s`: episodes per second; `cuts`: how often the connections were cut.

The exit code is 1 if anything was lost, wrong, executed twice or leaked.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from benchmarks.gateway_call import ENVIRONMENT, TOKEN, Gateway, connect_worker, run_gateway
from benchmarks.gateway_episodes.relay import run_relay
from benchmarks.gateway_episodes.worlds import SERVE, Play, World
from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla.env_gateway.v1.episode_service_pb2_grpc import EpisodeServiceStub
from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.rpc import rpc
from flotilla_rollout.adapters.env_gateway import GatewayEnvironment, GatewayEpisode
from flotilla_rollout.ports import EnvironmentLost
from flotilla_rollout.types import OpenRequest

T = TypeVar("T")

BUDGET_S, CALL_S, GRADE_S = 300.0, 60.0, 120.0
SETTLE_S = 120.0
# Of the pool of processes that are started ahead, which is no episode's.
_POOL = "warm_servers"


class WrongOutcome(Exception):
    """An answer that an episode cannot go on with."""


@dataclass
class Tally:
    """Results of all episodes so far."""

    lost: Counter[str] = field(default_factory=Counter[str])
    wrong: int = 0
    regraded: int = 0
    calls: int = 0
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    async def measure(self, name: str, work: Awaitable[T]) -> T:
        started = time.perf_counter()
        result = await work
        self.seconds[name].append(time.perf_counter() - started)
        return result

    def figures(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, seconds in self.seconds.items():
            cuts = statistics.quantiles(seconds, n=20)
            found |= {f"{name}_p50_ms": 1e3 * cuts[9], f"{name}_p95_ms": 1e3 * cuts[18]}
        return found


class Player:
    """A worker that plays episodes of a world."""

    def __init__(self, environment: GatewayEnvironment, world: World) -> None:
        self._environment = environment
        self._world = world
        self.tally = Tally()

    async def play_all(self, numbers: Sequence[int], concurrency: int) -> None:
        left = iter(numbers)

        async def play_rest() -> None:
            for number in left:
                await self.tally.measure("episode", self._play(number))

        await asyncio.gather(*(play_rest() for _ in range(concurrency)))

    @asynccontextmanager
    async def open(self, number: int) -> AsyncGenerator[tuple[Play, GatewayEpisode]]:
        play, key = self._world.plan(number), AttemptKey(f"group-{number}", 0, 0)
        request = OpenRequest(key, json.dumps(play.task), opening=1, budget_s=BUDGET_S)
        opening = self._environment.open_episode(request)
        episode = await self.tally.measure("open", opening.__aenter__())
        try:
            yield play, episode
        finally:
            await opening.__aexit__(None, None, None)

    async def _play(self, number: int) -> None:
        try:
            async with self.open(number) as (play, episode):
                await self._play_calls(play, episode)
                await self._grade_twice(play, episode)
        except (EnvironmentLost, WrongOutcome) as error:
            self.tally.lost[str(error)] += 1

    async def _play_calls(self, play: Play, episode: GatewayEpisode) -> None:
        for name, arguments in play.calls:
            call = episode.call_tool(name, json.dumps(arguments), CALL_S)
            result = await self.tally.measure("call", call)
            if result.outcome != "ok":
                raise WrongOutcome(f"{result.outcome}: {result.text}")
            self.tally.calls += 1

    async def _grade_twice(self, play: Play, episode: GatewayEpisode) -> None:
        grade = await self.tally.measure("grade", episode.request_grade("done", b"", GRADE_S))
        if grade.reward is None:
            raise WrongOutcome(f"{grade.reason}: {grade.detail}")
        self.tally.wrong += grade.reward != play.reward
        self.tally.regraded += await episode.request_grade("done", b"", GRADE_S) != grade


class Watch:
    """Reads what a gateway holds."""

    def __init__(self, gateway: Gateway, temporary: Path, world: World) -> None:
        self._process = psutil.Process(gateway.process.pid)
        self._address = gateway.address
        self._temporary = temporary
        self._world = world

    def measure_mib(self) -> float:
        return self._process.memory_full_info().pss / 2**20

    async def count_held(self) -> dict[str, int]:
        async with rpc.channel(self._address, token=TOKEN) as channel:
            stub: Any = EpisodeServiceStub(channel)
            status = await stub.GetStatus(pb.GetStatusRequest(), timeout=60.0)
        # What the pool starts, or is about to, is not held by anybody.
        pool = [each for each in status.limiters if each.name == _POOL]
        places = (each.in_flight + each.waiting for each in status.limiters if each.name != _POOL)
        return {
            "episodes": sum(sum(each.episodes.values()) for each in status.environments),
            "instances": status.instances_created - status.instances_closed,
            "instances_at_server": self._world.count_instances(),
            "deletions": status.delete_backlog,
            "places": sum(places),
            "missing_in_pool": sum(each.limit - each.in_flight for each in pool),
            "processes": len(self._process.children(recursive=True)),
            "files": self._process.num_fds(),
            "folders": len(list(self._temporary.iterdir())),
        }

    async def settle(self, before: dict[str, int] | None = None) -> dict[str, int]:
        """Return what is held beyond `before` when it has stopped to fall, or after SETTLE_S."""
        until = time.monotonic() + SETTLE_S
        while True:
            held = await self.count_held()
            more = {name: count - (before or {}).get(name, 0) for name, count in held.items()}
            names = held if before else ("episodes", "instances", "deletions", "missing_in_pool")
            left = {name: more[name] for name in names if more[name] > 0}
            if not left or time.monotonic() > until:
                return left if before else held
            await asyncio.sleep(0.25)

    def list_processes(self) -> list[psutil.Process]:
        return [self._process, *self._process.children(recursive=True)]


async def hold_open(player: Player, watch: Watch, numbers: Sequence[int]) -> float:
    """Open episodes concurrently; return the gateway's memory while all of them are open."""
    everybody, measured = asyncio.Barrier(len(numbers) + 1), asyncio.Event()

    async def open_one(number: int) -> None:
        async with player.open(number):
            await everybody.wait()
            await measured.wait()

    async with asyncio.TaskGroup() as tasks:
        for number in numbers:
            tasks.create_task(open_one(number))
        await everybody.wait()
        mib = watch.measure_mib()
        measured.set()
    return mib


async def play_episodes(
    given: argparse.Namespace, address: str, watch: Watch, world: World
) -> dict[str, Any]:
    count, concurrency = given.episodes, given.concurrency
    first, rest = range(count, count + concurrency), range(count + concurrency, count * 9)
    async with connect_worker(address) as environment:
        # Imports, connections and caches are there after the first ones.
        beginner = Player(environment, world)
        await beginner.play_all(first, concurrency)
        held = await watch.settle()
        mib = [watch.measure_mib()]
        open_mib = await hold_open(Player(environment, world), watch, rest[:concurrency])
        await watch.settle()
        player, started = Player(environment, world), time.perf_counter()
        for half in (range(count // 2), range(count // 2, count)):
            await player.play_all(half, concurrency)
            mib.append(watch.measure_mib())
            print(f"{half.stop} of {count} episodes", file=sys.stderr)
        seconds = time.perf_counter() - started
    leaked, executed = await watch.settle(held), world.count_calls()
    tally, calls = player.tally, player.tally.calls + beginner.tally.calls
    return {
        "episodes": count,
        "lost": dict(tally.lost + beginner.tally.lost),
        "wrong": tally.wrong + beginner.tally.wrong,
        "regraded": tally.regraded + beginner.tally.regraded,
        "twice": executed.total() - len(executed),
        "missed": calls - len(executed),
        "leaked": leaked,
        "mib": [round(each, 1) for each in mib],
        "grown_kib": round(1024 * (mib[2] - mib[1]) / (count - count // 2), 2),
        "open_kib": round(1024 * (open_mib - mib[0]) / concurrency, 1),
        **{name: round(value, 1) for name, value in tally.figures().items()},
        "per_s": round(count / seconds, 1),
    }


async def measure(
    given: argparse.Namespace, gateway: Gateway, watch: Watch, world: World
) -> dict[str, Any]:
    if not given.cut_every:
        return await play_episodes(given, gateway.address, watch, world)
    async with run_relay(gateway.address, given.cut_every) as (address, relay):
        return {**await play_episodes(given, address, watch, world), "cuts": relay.cuts}


def run_bench(given: argparse.Namespace) -> dict[str, Any]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        temporary = folder / "tmp"
        temporary.mkdir()
        world = stack.enter_context(SERVE[given.servers](folder, given.concurrency))
        environment = {**ENVIRONMENT, "TMPDIR": str(temporary)}
        with run_gateway(folder, world.section, environment) as gateway:
            watch = Watch(gateway, temporary, world)
            figures = asyncio.run(measure(given, gateway, watch, world))
            processes = watch.list_processes()
        left = [" ".join(each.cmdline()) for each in psutil.wait_procs(processes, 5.0)[1]]
        return {**figures, "survivors": left + os.listdir(temporary)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--servers", choices=list(SERVE), default="http")
    parser.add_argument("--cut-every", type=float, default=0.0, metavar="SECONDS")
    given = parser.parse_args()
    if given.episodes < 4 or given.concurrency < 1 or given.cut_every < 0:
        parser.error("--episodes must be at least 4, --concurrency 1, --cut-every 0")
    figures = run_bench(given)
    print(json.dumps(figures))
    bad = ("lost", "wrong", "regraded", "twice", "missed", "leaked", "survivors")
    return int(any(figures[name] for name in bad))


if __name__ == "__main__":
    sys.exit(main())
