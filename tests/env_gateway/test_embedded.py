"""The embedded environments behind the gateway, graded by real verifiers in real workers."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from environments.oracle import plan
from environments.tasks import make_task
from services.env_gateway.adapters.embedded import EmbeddedBackend
from services.env_gateway.config import EnvGatewayConfig
from services.env_gateway.episodes import State
from services.env_gateway.gateway import Gateway
from services.env_gateway.grading import Reason
from services.env_gateway.journal import Journal
from services.env_gateway.ports import Backend, Text
from services.env_gateway.session import Outcome, Session
from services.env_gateway.verdicts import VerifierRunner, load_digests
from services.env_gateway.verify.pool import VerifierPool
from tests.env_gateway.support import open_spec, opened, states

DIGESTS = Path(__file__).parents[2] / "environments" / "verifiers.sha256"
ENV_KEYS = ("booking", "tracker", "shop")


@asynccontextmanager
async def grading_gateway(
    backends: Mapping[str, Backend], config: EnvGatewayConfig | None = None
) -> AsyncGenerator[Gateway]:
    """A gateway that runs the verifiers of this repository, and no others."""
    settings = config or EnvGatewayConfig()
    pool = VerifierPool(size=1, memory_bytes=2**29)
    await pool.start()
    runner = VerifierRunner(settings.verifiers, pool, load_digests(DIGESTS))
    journal = Journal(None)
    gateway = Gateway(settings, backends, runner, journal, incarnation="gw")
    try:
        yield gateway
    finally:
        await gateway.drain(0.0)
        await pool.close()
        journal.close()


async def solve(gateway: Gateway, session: Session, task: Mapping[str, Any]) -> None:
    for seq, (name, arguments) in enumerate(plan(task)):
        answer, _ = await gateway.call(session, seq, name, json.dumps(arguments), 5.0)
        assert answer.outcome is Outcome.OK, answer


async def reward_of(gateway: Gateway, task: Mapping[str, Any], *, act: bool, attempt: int) -> Any:
    session = await opened(gateway, open_spec(attempt, task=json.dumps(task)))
    if act:
        await solve(gateway, session, task)
    grade = await gateway.grade(session, "", None, 10.0)
    gateway.close(session.episode.episode_id)
    assert grade.reason is None, grade.detail
    return grade.reward


@pytest.mark.parametrize("env_key", ENV_KEYS)
async def test_the_oracle_passes_and_doing_nothing_fails(env_key: str) -> None:
    async with grading_gateway({"embedded": EmbeddedBackend()}) as gateway:
        for index in range(4):
            task = make_task(env_key, "train", index)
            assert await reward_of(gateway, task, act=True, attempt=2 * index) == 1.0
            assert await reward_of(gateway, task, act=False, attempt=2 * index + 1) == 0.0


async def test_a_tool_that_refuses_tells_the_policy_why() -> None:
    async with grading_gateway({"embedded": EmbeddedBackend()}) as gateway:
        task = make_task("booking", "train", 0)
        session = await opened(gateway, open_spec(task=json.dumps(task)))
        name = plan(task)[0][0]
        answer, _ = await gateway.call(session, 0, name, '{"nonsense": 1}', 5.0)
        assert answer.outcome is Outcome.TOOL_ERROR
        assert isinstance(answer.parts[0], Text) and answer.parts[0].text


async def test_a_verifier_that_is_not_listed_does_not_run() -> None:
    task = make_task("booking", "train", 0) | {"verifier_func": "def verify(env):\n    return 1\n"}
    async with grading_gateway({"embedded": EmbeddedBackend()}) as gateway:
        session = await opened(gateway, open_spec(task=json.dumps(task)))
        grade = await gateway.grade(session, None, None, 5.0)
        assert (grade.reward, grade.reason) == (None, Reason.EXECUTION_FAILED)
        assert "unsafe_local_verifiers" in grade.detail


async def test_data_that_does_not_exist_fails_the_open_at_once() -> None:
    task = make_task("booking", "train", 0) | {"data_id": "nowhere"}
    async with grading_gateway({"embedded": EmbeddedBackend()}) as gateway:
        session, entered = await states(gateway, open_spec(task=json.dumps(task)))
        assert entered[-1] is State.FAILED
        assert "nowhere" in (session.failure or "")


async def test_hundreds_of_episodes_open_at_once() -> None:
    task = json.dumps(make_task("shop", "train", 1))
    async with grading_gateway({"embedded": EmbeddedBackend()}) as gateway:
        specs = [open_spec(i, task=task, opening=8, group_id=f"g{i // 8}") for i in range(256)]
        sessions = await asyncio.gather(*(opened(gateway, spec) for spec in specs))
        assert gateway.admission.held == 256
        for session in sessions:
            gateway.close(session.episode.episode_id)
