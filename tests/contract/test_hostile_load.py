"""Strangers that hold connections: the bound of each, and their cost for all other callers."""

import asyncio
import json
import subprocess
import sys
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flotilla_common.rpc import rpc
from tests.support.repository import ROOT

TOKEN = "0123456789abcdef"


async def reason_of(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = rpc.service_error(caught.value)
    assert error is not None
    return error.reason


async def test_only_so_many_watch_the_health_of_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "MOST_WATCHES", 2)
    server = rpc.server(token=TOKEN)
    async with (
        rpc.serving(server, "127.0.0.1:0") as serving,
        rpc.plain_channel(serving.address) as channel,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for watch in watches:
            await watch.read()
        refused = stub.Watch(health_pb2.HealthCheckRequest())
        assert await reason_of(refused.read()) == "TOO_MANY_STREAMS"
        # The end of one makes room for the next.
        watches[0].cancel()
        while True:
            try:
                await stub.Watch(health_pb2.HealthCheckRequest()).read()
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.01)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_strangers_who_hold_on_to_everything_cost_others_little() -> None:
    command = (sys.executable, "-m", "benchmarks.hostile_load", "--scale", "0.2", "--calls", "200")
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    for name in ("learner", "env_gateway"):
        found = figures[name]
        assert found["holding"]["connections"] == 500, name
        assert found["grown_mib"] < 150, name
        # Noise of a few milliseconds must not count as three times the quiet figure.
        assert found["p99_ms"] < max(3 * found["quiet_p99_ms"], 50), name
        # Calls without a token are refused, and half of the watches need one.
        assert found["holding"]["half_sent"] == 0, name
        assert found["holding"]["watches"] > 250, name
    # Submissions with a lease wait; grades had no episode.
    assert figures["learner"]["holding"]["submissions"] < 40
    assert figures["env_gateway"]["holding"]["submissions"] == 0
