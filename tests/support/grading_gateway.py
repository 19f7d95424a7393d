"""A gateway that grades with the verifiers of this repository, in real workers."""

import json
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from flotilla_common.domain.attempts import ToolOutcome
from flotilla_env_gateway.adapters.embedded.backend import EmbeddedBackend
from flotilla_env_gateway.config.backends import EmbeddedConfig
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.episodes.episode_session import Session
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.episodes.instance_journal import InstanceJournal
from flotilla_env_gateway.grading.grader import VerifierRunner
from flotilla_env_gateway.grading.trusted_verifiers import load_digests
from flotilla_env_gateway.grading.verifier_functions import load_functions
from flotilla_env_gateway.ports import Backend, Recorder
from flotilla_env_gateway.verify.verifier_pool import VerifierPool
from flotilla_environments.reference_policies import plan_calls
from tests.support.fake_gateway import open_spec, opened
from tests.support.repository import ROOT

ENV_KEYS = ("booking", "tracker", "shop")
DIGESTS = ROOT / "environments/flotilla_environments/verifiers.sha256"


@asynccontextmanager
async def grading_gateway(
    backends: Mapping[str, Backend],
    config: EnvGatewayConfig | None = None,
    recorder: Recorder | None = None,
) -> AsyncGenerator[Gateway]:
    """A gateway that grades for real; without a sandbox only this repository's verifiers, and
    functions of trusted modules, run."""
    settings = config or EnvGatewayConfig()
    unsafe = settings.verifiers.unsafe_local_verifiers
    functions = await load_functions(settings)
    modules = [each.module for each in functions.values() if each.module]
    pool = VerifierPool(size=1, memory_bytes=2**29, unsafe=unsafe, modules=modules)
    await pool.start_workers()
    digests = load_digests(DIGESTS)
    runner = VerifierRunner(settings.verifiers, pool, digests, functions=functions)
    journal = InstanceJournal(None)
    # Unique, as for every start of a gateway: servers remember requests.
    incarnation = f"run.gw.{uuid.uuid4().hex[:8]}"
    gateway = Gateway(
        settings, backends, runner, journal, incarnation=incarnation, recorder=recorder
    )
    try:
        yield gateway
    finally:
        await gateway.drain(0.0)
        await pool.close()
        journal.close()


@asynccontextmanager
async def embedded_gateway() -> AsyncGenerator[Gateway]:
    backend = EmbeddedBackend(EmbeddedConfig())
    try:
        async with grading_gateway({"embedded": backend}) as gateway:
            yield gateway
    finally:
        await backend.close()


async def solve(gateway: Gateway, session: Session, task: Mapping[str, Any]) -> None:
    for seq, (name, arguments) in enumerate(plan_calls(task)):
        answer, _ = await gateway.call_tool(session, seq, name, json.dumps(arguments), 5.0)
        assert answer.outcome is ToolOutcome.OK, answer


async def reward_of(gateway: Gateway, task: Mapping[str, Any], *, act: bool, attempt: int) -> Any:
    session = await opened(gateway, open_spec(attempt, task=json.dumps(task)))
    if act:
        await solve(gateway, session, task)
    grade = await gateway.grade_episode(session, "", None, 10.0)
    gateway.close(session.episode.episode_id)
    assert grade.reason is None, grade.detail
    return grade.reward
