"""The gateway process as others see it: a scrape of its metrics, one span per call, and its
status."""

import asyncio
import json
import os
import shutil
import sys
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla.env_gateway.v1 import episode_service_pb2_grpc
from flotilla_common.rpc import rpc
from flotilla_common.rpc.free_ports import free_address
from flotilla_environments.reference_policies import plan_calls
from flotilla_environments.tasks import make_task
from tests.contract.test_episode_service import EpisodeClient
from tests.support.repository import ROOT
from tests.support.waiting import until

TOKEN = "shown-token-0123456789"
SPEC: dict[str, Any] = {
    "name": "shown",
    "policy": {"model": "none", "dtype": "float32", "max_model_len": 8},
    "env_gateway": {
        "backend": "embedded",
        "lease_ttl_s": 2.0,
        "drain_s": 0.1,
        "verifiers": {"workers": 1},
    },
}
BOOKING = make_task("booking", "train", 0)
SHOP = make_task("shop", "train", 0)
METRICS = {
    'flotilla_episodes{backend="embedded",env="shop",state="ready"} 1.0',
    'flotilla_episode_open_seconds_count{env="booking",phase="queued"} 1.0',
    'flotilla_episode_open_seconds_count{env="booking",phase="provisioning"} 1.0',
    'flotilla_episode_open_seconds_count{env="booking",phase="warming"} 1.0',
    'flotilla_episode_open_seconds_count{env="booking",phase="all"} 1.0',
    'flotilla_tool_call_seconds_count{env="booking",outcome="ok",phase="queue"} 2.0',
    'flotilla_tool_call_seconds_count{env="booking",outcome="ok",phase="upstream"} 2.0',
    'flotilla_tool_call_seconds_count{env="booking",outcome="bad_tool",phase="all"} 1.0',
    'flotilla_upstream_attempts_total{env="booking",result="ok"} 2.0',
    'flotilla_limiter_limit{limiter="episodes",of=""} 512.0',
    'flotilla_limiter_limit{limiter="calls",of="booking"} 16.0',
    'flotilla_limiter_inflight{limiter="episodes",of="shop"} 1.0',
    'flotilla_limiter_queue{limiter="creations",of="embedded"} 0.0',
    'flotilla_retry_budget_tokens{env="booking"} 20.0',
    'flotilla_breaker_state{env="booking"} 0.0',
    "flotilla_delete_backlog 0.0",
    "flotilla_orphans_reclaimed_total 0.0",
    'flotilla_grades_total{env="booking"} 1.0',
    'flotilla_no_grades_total{env="shop",reason="no_verifier"} 1.0',
    'flotilla_lease_expiries_total{env="tracker"} 1.0',
    'flotilla_episodes_tainted_total{env="booking"} 0.0',
    "# TYPE flotilla_images_total counter",
}
# With values that differ from run to run.
FAMILIES = {"flotilla_event_loop_lag_seconds_count", "flotilla_content_bytes_total"}


@dataclass(frozen=True)
class Process:
    """A gateway that serves, and where."""

    client: EpisodeClient
    address: str
    metrics: str
    folder: Path

    def scrape(self) -> list[str]:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=5) as answer:
            return answer.read().decode().splitlines()

    def spans(self) -> list[dict[str, Any]]:
        files = list((self.folder / "run" / "traces").glob("*.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@asynccontextmanager
async def process(folder: Path) -> AsyncGenerator[Process]:
    spec = folder / "spec.json"
    spec.write_text(json.dumps(SPEC))
    address, metrics = (free_address() for _ in range(2))
    command = (sys.executable, "-m", "flotilla_env_gateway", "--config", str(spec))
    run = ("--run-id", "shown", "--run-dir", str(folder / "run"))
    started = await asyncio.create_subprocess_exec(
        *(*command, *run, "--listen", address, "--metrics-listen", metrics),
        cwd=ROOT,
        env={
            **os.environ,
            "FLOTILLA_TRACE": "1",
            "FLOTILLA_TOKEN": TOKEN,
            # Milliseconds between writes of what has been recorded.
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        },
    )
    try:
        async with rpc.channel(address, token=TOKEN) as channel:
            yield Process(client(channel), address, metrics, folder)
    finally:
        started.terminate()
        assert await asyncio.wait_for(started.wait(), 30.0) == 0


def client(channel: grpc.aio.Channel) -> EpisodeClient:
    found = object.__new__(EpisodeClient)
    found.stub = episode_service_pb2_grpc.EpisodeServiceStub(channel)
    return found


async def play(gateway: EpisodeClient) -> str:
    """A graded episode, one without a verifier that stays open, and one that no client renews."""
    states = await gateway.open(0, task_json=json.dumps(BOOKING))
    booking = states[-1].episode_id
    calls = [*plan_calls(BOOKING), ("no_such_tool", {})]
    for seq, (name, arguments) in enumerate(calls):
        await gateway.call(booking, seq, name, json.dumps(arguments))
    assert (await gateway.grade(booking)).HasField("reward")
    await gateway.stub.CloseEpisode(pb.CloseEpisodeRequest(episode_id=booking))
    await gateway.open(1, task_json=json.dumps(make_task("tracker", "train", 0)))
    shop = json.dumps(SHOP | {"verifier_func": None})
    states = await gateway.open(2, task_json=shop)
    await gateway.grade(states[-1].episode_id)
    return states[-1].episode_id


async def flotilla(*arguments: str) -> tuple[int, str]:
    command = (sys.executable, "-m", "flotilla_launcher.cli.app", "env", "status", *arguments)
    started = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "FLOTILLA_TOKEN": TOKEN, "COLUMNS": "200"},
    )
    output, _ = await asyncio.wait_for(started.communicate(), 30.0)
    assert started.returncode is not None
    return started.returncode, output.decode()


async def test_a_gateway_shows_what_it_does(tmp_path: Path) -> None:
    async with process(tmp_path) as gateway:
        kept = await play(gateway.client)
        async with renewed(gateway.client, kept):
            await check_metrics(gateway)
            await check_status(gateway)
            await check_spans(gateway)


@asynccontextmanager
async def renewed(gateway: EpisodeClient, episode_id: str) -> AsyncGenerator[None]:
    """Keep an episode open meanwhile."""
    request = pb.RenewEpisodesRequest(worker_id="rollout-0", episode_ids=[episode_id])

    async def renew() -> None:
        while True:
            await gateway.stub.RenewEpisodes(request)
            await asyncio.sleep(0.2)

    task = asyncio.create_task(renew())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def check_metrics(gateway: Process) -> None:
    lines: list[str] = []
    for _ in range(100):
        lines = await asyncio.to_thread(gateway.scrape)
        if set(lines) >= METRICS:
            break
        await asyncio.sleep(0.1)
    assert METRICS - set(lines) == set()
    shown = {line.partition("{")[0].partition(" ")[0] for line in lines}
    assert FAMILIES - shown == set()


async def check_status(gateway: Process) -> None:
    code, output = await flotilla("--address", gateway.address)
    assert code == 0, output
    rows = {line.split()[0]: line for line in output.splitlines() if line.strip()}
    assert "serving" in rows[gateway.address]
    assert rows["booking"].split() == [
        *("booking", "embedded", "-", "512", "3", "0", "(0.0%)", "1", "0", "0", "0", "closed")
    ]
    assert rows["shop"].split()[2:4] == ["ready", "1"]
    assert "1 (no_verifier 1)" in rows["shop"]
    assert rows["tracker"].split()[-2] == "1", "one episode expired"
    assert "created 3" in rows["instances"]
    sandbox = "bounded by rlimits" if shutil.which("bwrap") else "none"
    assert f"sandbox of verifiers: {sandbox}" in output
    code, output = await flotilla("--address", gateway.address, "--json")
    [reported] = json.loads(output)["gateways"]
    by_env = {one["env_key"]: one for one in reported["environments"]}
    assert by_env["booking"]["outcomes"] == {"bad_tool": "1", "ok": "2"}
    limiters = {(one["name"], one["of"]): one for one in reported["limiters"]}
    assert limiters["creations", "embedded"]["in_flight"] == 0
    assert limiters["episodes", ""]["in_flight"] == 1


async def check_spans(gateway: Process) -> None:
    def calls() -> list[dict[str, Any]]:
        return [span["attributes"] for span in gateway.spans() if span["name"] == "call"]

    await until(lambda: len(calls()) == 3)
    episode_id = calls()[0]["episode_id"]
    assert calls() == [
        {
            "episode_id": episode_id,
            "call_seq": seq,
            "env_key": "booking",
            "tool": tool,
            "outcome": outcome,
            "attempts": attempts,
        }
        for seq, (tool, outcome, attempts) in enumerate(
            [
                *((name, "ok", 1) for name, _ in plan_calls(BOOKING)),
                ("no_such_tool", "bad_tool", 0),
            ]
        )
    ]
