"""Gateways that record and replay in the test's own process."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from flotilla_common.spec.config import parse_config
from flotilla_env_gateway.adapters.backend_factory import build_backend
from flotilla_env_gateway.adapters.replay.backend import ReplayBackend
from flotilla_env_gateway.adapters.replay.recorder import Recording
from flotilla_env_gateway.config.backends import ReplayConfig
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.ports import Backend, CallAnswer
from tests.support.fake_environments import FakeGrader
from tests.support.fake_gateway import running
from tests.support.grading_gateway import grading_gateway

ROOM = 2**20


@asynccontextmanager
async def recording(
    run: Path, backend: Backend, grader: FakeGrader | None = None, *, most: int = ROOM
) -> AsyncGenerator[Gateway]:
    """A gateway over fakes that records into a run's directory."""
    recorder = Recording(run, max_bytes=most)
    async with running(backend, grader, recorder=recorder) as gateway:
        yield gateway
    await recorder.close()


@asynccontextmanager
async def recording_servers(run: Path, **section: Any) -> AsyncGenerator[Gateway]:
    """A gateway over real MCP servers that records into a run's directory."""
    config = parse_config(EnvGatewayConfig, {"backend": "mcp", **section}, where="spec")
    backend, recorder = build_backend("mcp", config), Recording(run, max_bytes=ROOM)
    try:
        async with grading_gateway({"mcp": backend}, config, recorder) as gateway:
            yield gateway
    finally:
        await backend.close()
        await recorder.close()


@asynccontextmanager
async def replaying(run: Path) -> AsyncGenerator[Gateway]:
    backend = ReplayBackend(ReplayConfig(run=run))
    tables = {"replay": {"run": str(run)}}
    async with running(backend, backend="replay", backends=tables) as gateway:
        yield gateway


async def call(gateway: Gateway, session: Session, name: str, **arguments: Any) -> CallAnswer:
    seq = session.episode.next_seq
    return (await gateway.call_tool(session, seq, name, json.dumps(arguments), 10.0))[0]
