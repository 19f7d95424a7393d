"""A verifier that reads the final state through tools, for a server without a database."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flotilla_common.domain.attempts import Grade
from flotilla_common.rpc.errors import ConfigError
from flotilla_env_gateway.adapters.mcp.stdio import McpStdioBackend
from flotilla_env_gateway.config.backends import McpServer
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.grading.verifier_files import load_verifiers
from tests.support.environment_processes import environment_command
from tests.support.fake_gateway import open_spec, opened, task_json
from tests.support.grading_gateway import grading_gateway

NOTED = """
def milk_was_noted(env):
    notes = env.call_tool("list_notes")
    print("notes", notes)
    return "milk" in str(notes)
"""


@asynccontextmanager
async def gateway() -> AsyncGenerator[Gateway]:
    """The verifiers here are the test's own, and run even without a sandbox."""
    command = environment_command("-m", "tests.support.mcp_stdio_server")
    # A fork has no view of a folder of its own.
    config = McpServer(transport="stdio", command=command, shared_state=True)
    settings = EnvGatewayConfig.model_validate(
        {
            "backend": "mcp",
            "servers": [config.model_dump(exclude_unset=True)],
            "verifiers": {"unsafe_local_verifiers": True, "attempts": 1},
        }
    )
    async with grading_gateway({"mcp": McpStdioBackend(config)}, settings) as running:
        yield running


async def graded(verifier: str, *calls: str) -> Grade:
    async with gateway() as running:
        task = task_json(data_id="monday", verifier_func=verifier)
        session = await opened(running, open_spec(task=task))
        for number, text in enumerate(calls):
            await running.call_tool(session, number, "add_note", f'{{"text": "{text}"}}', 20.0)
        return await running.grade_episode(session, None, None, 30.0)


async def test_a_verifier_reads_the_final_state_by_a_tool() -> None:
    grade = await graded(NOTED, "eggs", "milk")
    assert grade.reward == 1, grade
    assert "milk" in grade.stdout


async def test_what_was_not_done_earns_nothing() -> None:
    assert (await graded(NOTED, "eggs")).reward == 0


async def test_a_verifier_may_not_call_what_writes() -> None:
    verifier = 'def check(env):\n    return env.call_tool("add_note", text="milk")\n'
    grade = await graded(verifier)
    assert grade.reward is None
    assert "tools that only read, and 'add_note' is none" in grade.detail


async def test_a_tool_that_fails_fails_the_verifier_unless_it_is_caught() -> None:
    verifier = (
        "def check(env):\n    try:\n        env.call_tool('list_notes', at='noon', x=1)\n"
        "        env.call_tool('nothing')\n    except Exception as error:\n"
        "        print(error)\n        return 1\n"
    )
    grade = await graded(verifier)
    assert grade.reward == 1 and "'nothing' is none" in grade.stdout


def test_a_verifier_of_an_environment_is_read_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "check.py").write_text(NOTED)
    notes = {"verifier": str(tmp_path / "check.py")}
    config = EnvGatewayConfig.model_validate({"environments": {"notes": notes}})
    assert load_verifiers(config) == {"notes": NOTED}


@pytest.mark.parametrize("content", [None, "x = 1", "def check(env:"])
def test_a_verifier_that_cannot_be_is_refused_by_its_key(
    tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "check.py"
    if content is not None:
        path.write_text(content)
    config = EnvGatewayConfig.model_validate({"environments": {"notes": {"verifier": str(path)}}})
    with pytest.raises(ConfigError, match=r"environments\.notes\.verifier: .*check\.py"):
        load_verifiers(config)
