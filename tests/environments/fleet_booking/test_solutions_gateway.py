"""Fleet's booking tasks through the gateway: opened, solved by calls and graded."""

import json
from collections.abc import AsyncIterator
from hashlib import sha256
from typing import Any

import pytest

from flotilla_common.domain.attempts import ToolOutcome
from flotilla_env_gateway.adapters.embedded.backend import EmbeddedBackend
from flotilla_env_gateway.config.backends import EmbeddedConfig
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.episodes.instance_journal import InstanceJournal
from flotilla_env_gateway.grading.grader import VerifierRunner
from flotilla_env_gateway.verify.verifier_pool import VerifierPool
from flotilla_environments.api import Instance
from tests.environments.fleet_booking.solutions.site import Site
from tests.environments.fleet_booking.task_file import SOLUTIONS, TASKS, needs_tasks, open_task
from tests.support.fake_gateway import open_spec, opened

pytestmark = needs_tasks
CHOSEN = ("iz3n5yb025jd", "ids1n9lukg0q", "oxbtz0wg8d6", "jieklemsr1xv")


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    """It treats the user's verifiers as its own, so that they need no sandbox."""
    pool = VerifierPool(size=1, memory_bytes=2**30)
    trusted = {sha256(task["verifier_func"].encode()).hexdigest() for task in TASKS.values()}
    settings = EnvGatewayConfig()
    runner = VerifierRunner(settings.verifiers, pool, frozenset(trusted))
    backend, journal = EmbeddedBackend(EmbeddedConfig()), InstanceJournal(None)
    made = Gateway(settings, {"embedded": backend}, runner, journal, incarnation="run.gw")
    try:
        yield made
    finally:
        await made.drain(0.0)
        await backend.close()
        await pool.close()
        journal.close()


def calls_of(instance: Instance, short: str) -> list[tuple[str, dict[str, Any]]]:
    made: list[tuple[str, dict[str, Any]]] = []

    def call(name: str, arguments: dict[str, Any]) -> Any:
        made.append((name, arguments))
        return instance.call(name, arguments)

    SOLUTIONS[short](Site(call, TASKS[short]["prompt"]))
    return made


@pytest.mark.parametrize("short", CHOSEN)
async def test_a_task_is_graded_before_and_after_its_solution(gateway: Gateway, short: str) -> None:
    task = json.dumps(TASKS[short])
    untouched = await opened(gateway, open_spec(0, task=task))
    before = await gateway.grade_episode(untouched, "", None, 20.0)
    assert (before.reason, before.reward) == (None, 0.0)
    assert before.checks_failed
    session = await opened(gateway, open_spec(1, task=task))
    for seq, (name, arguments) in enumerate(calls_of(open_task(TASKS[short]), short)):
        answer, _ = await gateway.call_tool(session, seq, name, json.dumps(arguments), 5.0)
        assert answer.outcome is ToolOutcome.OK, answer
    after = await gateway.grade_episode(session, "done", None, 20.0)
    assert (after.reason, after.reward) == (None, 1.0)
