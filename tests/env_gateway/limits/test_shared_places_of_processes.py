"""A gateway as a process of its own, and two servers of which one never answers."""

import asyncio
import json
import time
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla_common.rpc import rpc
from tests.env_gateway.episodes.test_episode_session_deadlines import DAY_S, shared_server
from tests.support.fake_gateway import task_json
from tests.support.gateway_process import gateway_process

# Naps so long that what else the machine does hardly counts.
CALLERS, CALLS, NAP_S = 4, 15, 1.0
STUCK = 64
SECTION = """
[env_gateway]
backend = "mcp"
lease_ttl_s = 600.0
drain_s = 1.0
close_timeout_s = 1.0
limits = {{ start_calls = 32, max_calls = 32 }}
environments.healthy.servers = ["healthy"]
environments.stuck.servers = ["stuck"]
[[env_gateway.servers]]
name = "healthy"
url = "{healthy}"
[[env_gateway.servers]]
name = "stuck"
url = "{stuck}"
"""


async def opened(stub: Any, env: str, attempt: int) -> str:
    request = pb.OpenEpisodeRequest(
        request_id=f"{env}-{attempt}",
        run_id="run",
        group_id=env,
        attempt_index=attempt,
        opening=1,
        task_json=task_json(env_id=env),
        worker_id="rollout-0",
    )
    last = [response async for response in stub.OpenEpisode(request)][-1]
    assert last.state == pb.EPISODE_STATE_READY, last
    return last.episode_id


async def timed_nap(stub: Any, episode_id: str, seq: int, seconds: float = NAP_S) -> float:
    started = time.monotonic()
    await stub.CallTool(
        pb.CallToolRequest(
            episode_id=episode_id,
            call_seq=seq,
            name="nap",
            arguments_json=json.dumps({"seconds": seconds}),
            deadline=rpc.to_duration(60.0),
        )
    )
    return time.monotonic() - started


async def p95(stub: Any, episode_ids: list[str], first_seq: int) -> float:
    """The 95th percentile of the time of calls, one after the other in each episode."""

    async def calls(episode_id: str) -> list[float]:
        seqs = range(first_seq, first_seq + CALLS)
        return [await timed_nap(stub, episode_id, seq) for seq in seqs]

    times = sorted(chain(*await asyncio.gather(*map(calls, episode_ids))))
    return times[int(0.95 * len(times))]


async def stuck_calls(stub: Any) -> int:
    limiters = (await stub.GetStatus(pb.GetStatusRequest())).limiters
    return next(one.in_flight for one in limiters if (one.name, one.of) == ("calls", "stuck"))


@pytest.mark.slow
async def test_a_stuck_server_leaves_the_calls_of_another_environment_as_fast_as_before(
    tmp_path: Path,
) -> None:
    async with (
        shared_server() as healthy_url,
        shared_server() as stuck_url,
        gateway_process(tmp_path, SECTION.format(healthy=healthy_url, stuck=stuck_url)) as (
            _,
            stub,
        ),
    ):
        healthy = [await opened(stub, "healthy", attempt) for attempt in range(CALLERS)]
        bad = [await opened(stub, "stuck", attempt) for attempt in range(STUCK)]
        quiet = await p95(stub, healthy, 0)
        calls = [asyncio.create_task(timed_nap(stub, one, 0, DAY_S)) for one in bad]
        await asyncio.sleep(2.0)
        beside = await p95(stub, healthy, CALLS)
        held = await stuck_calls(stub)
        print(f"p95 quiet {quiet:.3f} s, beside {held} stuck calls {beside:.3f} s")
        assert 25 <= held < 32
        assert beside <= 2 * quiet
        for task in calls:
            task.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
