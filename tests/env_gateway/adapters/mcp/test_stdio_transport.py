"""Messages over standard input and output, with servers that write more than one line for each."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from flotilla_common.tasks.task_format import parse_task
from flotilla_env_gateway.adapters.mcp.stdio import McpStdioBackend
from flotilla_env_gateway.config.backends import McpServer
from flotilla_env_gateway.ports import BackendError, Instance, ProvisionRequest, Text
from tests.env_gateway.adapters.mcp.talkative_server import FLOODS
from tests.support.environment_processes import environment_command
from tests.support.fake_gateway import task_json
from tests.support.loop_watch import watched_loop

MODULE = "tests.env_gateway.adapters.mcp.talkative_server"


@asynccontextmanager
async def talking(how: str, **config: object) -> AsyncGenerator[Instance]:
    """The instance of a server that speaks in a given way."""
    command = environment_command("-m", MODULE, how)
    # The module is found from the repository's folder.
    fixed = {"transport": "stdio", "command": command, "shared_state": True}
    server = McpServer.model_validate({**fixed, **config})
    backend = McpStdioBackend(server)
    request = ProvisionRequest("e1", parse_task(task_json()), 60.0)
    try:
        yield await backend.provision_instance(request, timeout_s=20.0)
    finally:
        await backend.close()


async def call(instance: Instance, name: str = "t") -> str:
    result = await instance.call_tool(name, {}, timeout_s=20.0)
    return "".join(part.text for part in result.parts if isinstance(part, Text))


@pytest.mark.parametrize("how", ["noise", "pretty", "ping", "newlines"])
async def test_an_answer_is_found_in_what_a_server_writes(how: str) -> None:
    async with talking(how) as instance:
        await instance.list_tools(timeout_s=20.0)
        assert await call(instance) == "done"
        assert await instance.is_alive(timeout_s=20.0)


@pytest.mark.parametrize("how", ["id first", "id last", "nested"])
async def test_an_answer_that_is_too_large_fails_its_own_call_only(how: str) -> None:
    async with talking(how, max_answer_bytes=2**16) as instance:
        await instance.list_tools(timeout_s=20.0)
        answers = await asyncio.gather(call(instance, "large"), call(instance), call(instance))
        assert answers[1:] == ["done", "done"]
        assert "the tool's answer was dropped: too_large" in answers[0]
        assert await call(instance) == "done"


@pytest.mark.parametrize("how", FLOODS)
async def test_a_flood_of_lines_neither_holds_the_loop_nor_lasts_beyond_the_call(how: str) -> None:
    async with talking(how) as instance:
        await instance.list_tools(timeout_s=20.0)
        async with watched_loop() as watch:
            with pytest.raises(BackendError) as caught:
                await instance.call_tool("flood", {}, timeout_s=1.0)
    assert (caught.value.kind, caught.value.delivered) == ("timeout", None)
    assert watch.longest_s < 0.05


async def test_pages_without_end_are_the_servers_fault() -> None:
    async with talking("endless") as instance:
        with pytest.raises(BackendError, match="do not end") as caught:
            await instance.list_tools(timeout_s=20.0)
    assert caught.value.invalid


async def test_a_list_of_tools_that_is_none_is_the_servers_fault() -> None:
    async with talking("none") as instance:
        with pytest.raises(BackendError, match="not as MCP has it"):
            await instance.list_tools(timeout_s=20.0)
