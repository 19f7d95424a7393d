"""A gateway with fake environments, for tests."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from flotilla_common.tasks.task_format import parse_task
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.episodes.episode_book import EpisodeSpec, EpisodeState
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.episodes.instance_journal import InstanceJournal
from flotilla_env_gateway.grading.grader import VerifierRunner
from flotilla_env_gateway.ports import Backend, Grader, Recorder
from flotilla_env_gateway.tools.computer_tool import ScaleImage
from tests.support.fake_environments import FakeGrader

VERIFIER = "def verify(env, final_answer=None):\n    return 1\n"


def task_json(**changes: Any) -> str:
    task = {
        "key": "task-1",
        "prompt": "Count to one.",
        "env_id": "fake",
        "verifier_func": VERIFIER,
        "env_variables": {"CURRENT_DATE": "2026-02-14", "LOGGED_IN_USER": "Ada"},
    }
    return json.dumps(task | changes)


def open_spec(attempt: int = 0, *, task: str | None = None, **changes: Any) -> EpisodeSpec:
    fields: dict[str, Any] = {
        "request_id": f"request-{attempt}-{changes.get('try_index', 0)}",
        "run_id": "run",
        "group_id": "group",
        "attempt_index": attempt,
        "try_index": 0,
        "opening": 1,
        "worker_id": "rollout-0",
        "task": parse_task(task or task_json()),
        "budget_s": 60.0,
    }
    return EpisodeSpec(**(fields | changes))


def config(**changes: Any) -> EnvGatewayConfig:
    """Verifiers are fakes, so that all of them may run."""
    values: dict[str, Any] = {
        "verifiers": {"unsafe_local_verifiers": True},
        "retry": {"base_s": 0.001, "cap_s": 0.01},
    }
    return EnvGatewayConfig.model_validate(values | changes)


@asynccontextmanager
async def running(
    backend: Backend,
    /,
    grader: Grader | None = None,
    *,
    journal: Path | None = None,
    incarnation: str = "gw",
    scale: ScaleImage | None = None,
    recorder: Recorder | None = None,
    **changes: Any,
) -> AsyncGenerator[Gateway]:
    """A gateway over fakes; its leases expire as configured, and it drains at the end."""
    settings = config(**changes)
    verifiers = VerifierRunner(settings.verifiers, grader or FakeGrader(), frozenset())
    book = InstanceJournal(journal)
    gateway = Gateway(
        settings,
        {settings.backend: backend},
        verifiers,
        book,
        incarnation=incarnation,
        scale=scale,
        recorder=recorder,
    )
    loop = asyncio.create_task(gateway.run_lease_loop())
    try:
        yield gateway
    finally:
        loop.cancel()
        with suppress(asyncio.CancelledError):
            await loop
        await gateway.drain(0.0)
        book.close()


async def states(gateway: Gateway, spec: EpisodeSpec) -> tuple[Session, list[EpisodeState]]:
    """Open an episode and follow it to READY or FAILED."""
    session = gateway.open_episode(spec)
    gateway.join_opening(session)
    try:
        return session, [state async for state in session.follow_states()]
    finally:
        gateway.leave_opening(session)


async def opened(gateway: Gateway, spec: EpisodeSpec | None = None) -> Session:
    """Open an episode and wait until it is ready."""
    session, entered = await states(gateway, spec or open_spec())
    assert entered[-1] is EpisodeState.READY, session.failure
    return session
