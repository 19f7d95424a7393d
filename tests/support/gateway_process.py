"""A gateway as a process of its own, and a client's connection to it."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla.env_gateway.v1 import episode_service_pb2_grpc
from flotilla_common.rpc import rpc
from flotilla_environments.tasks import make_task

TOKEN = "process-token-0123456789"
_SHARED = """
name = "test"
[policy]
model = "none"
dtype = "float32"
max_model_len = 128
"""


def write_spec(folder: Path, section: str) -> Path:
    """A run spec with `section`, which is TOML from `[env_gateway]` on."""
    spec = folder / "spec.toml"
    spec.write_text(_SHARED + section)
    return spec


@asynccontextmanager
async def gateway_process(
    folder: Path, section: str
) -> AsyncGenerator[tuple[asyncio.subprocess.Process, Any]]:
    """The process, and the stub of its service. Its journal is kept in `folder`."""
    async with (
        serving_process(folder, section) as (process, address),
        rpc.channel(address, token=TOKEN) as channel,
    ):
        yield process, episode_service_pb2_grpc.EpisodeServiceStub(channel)


@asynccontextmanager
async def serving_process(
    folder: Path, section: str
) -> AsyncGenerator[tuple[asyncio.subprocess.Process, str]]:
    """The process, and its address. Its journal is kept in `folder`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "flotilla_env_gateway", "--config", write_spec(folder, section)),
        *("--run-id", "run", "--run-dir", str(folder), "--listen", "127.0.0.1:0"),
        env={**os.environ, "FLOTILLA_TOKEN": TOKEN},
        stderr=asyncio.subprocess.PIPE,
        limit=2**20,
    )
    try:
        yield process, await _address(process)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    seen = b""
    while line := await process.stderr.readline():
        seen += line
        if b'"serving"' in line:
            return json.loads(line)["address"]
    raise AssertionError(seen.decode())


async def open_episode(stub: Any, attempt: int) -> pb.OpenEpisodeResponse:
    """The last state of an episode of a booking task."""
    request = pb.OpenEpisodeRequest(
        request_id=f"request-{attempt}",
        run_id="run",
        group_id="group",
        attempt_index=attempt,
        opening=1,
        task_json=json.dumps(make_task("booking", "train", attempt)),
        worker_id="rollout-0",
    )
    return [response async for response in stub.OpenEpisode(request)][-1]
