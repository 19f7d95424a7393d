"""A gateway over one backend with its server, and the actions of the contract's cases."""

import json
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from flotilla_common.domain.attempts import Grade, ToolOutcome
from flotilla_common.tasks.task_format import parse_task
from flotilla_env_gateway.adapters.backend_factory import build_backend
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.ports import Backend, CallAnswer, Instance, ProvisionRequest
from tests.env_gateway.backends.harness import BackendHarness, Call
from tests.support.fake_gateway import open_spec, opened
from tests.support.grading_gateway import grading_gateway

TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Bench:
    """`backend` is also in reach behind the gateway's back."""

    harness: BackendHarness
    backend: Backend
    gateway: Gateway

    async def open(self, attempt: int = 0, *, task: int = 0, **spec: Any) -> Session:
        text = json.dumps(self.harness.task(task))
        return await opened(self.gateway, open_spec(attempt, task=text, **spec))

    async def call(self, session: Session, call: Call, timeout_s: float = TIMEOUT_S) -> CallAnswer:
        name, arguments = call
        seq = session.episode.next_seq
        arguments_json = json.dumps(arguments)
        return (await self.gateway.call_tool(session, seq, name, arguments_json, timeout_s))[0]

    async def solve(self, session: Session, task: int = 0) -> None:
        for call in self.harness.solution(task):
            answer = await self.call(session, call)
            assert answer.outcome is ToolOutcome.OK, answer

    async def grade(self, session: Session) -> Grade:
        return await self.gateway.grade_episode(session, "", None, TIMEOUT_S)

    async def close(self, *sessions: Session) -> None:
        for session in sessions:
            self.gateway.close(session.episode.episode_id)
        await self.gateway.closer.wait_until_deleted(TIMEOUT_S)

    async def running(self) -> int:
        return await self.harness.running(self.backend)

    def request(self) -> ProvisionRequest:
        """Return a request for an instance that the gateway knows nothing of."""
        task = parse_task(json.dumps(self.harness.task(0)))
        return ProvisionRequest(f"run.gw.{uuid.uuid4().hex[:8]}-1", task, ttl_s=60.0)

    async def provision(self, request: ProvisionRequest | None = None) -> Instance:
        return await self.backend.provision_instance(request or self.request(), timeout_s=TIMEOUT_S)


@asynccontextmanager
async def opened_bench(harness: BackendHarness) -> AsyncGenerator[Bench]:
    config = EnvGatewayConfig.model_validate({"open_timeout_s": TIMEOUT_S, **harness.settings()})
    backend = build_backend(config.backend, config)
    try:
        async with grading_gateway({config.backend: backend}, config) as gateway:
            yield Bench(harness, backend, gateway)
    finally:
        await backend.close()
