"""MCP servers over stdio: real processes of a real server, one per episode."""

import asyncio
import json
import os
import signal
import sys
import uuid
from collections.abc import AsyncGenerator

import psutil
import pytest

from flotilla_common.tasks.task_format import parse_task
from flotilla_env_gateway.adapters.mcp.stdio import McpStdioBackend
from flotilla_env_gateway.config.backends import McpServer
from flotilla_env_gateway.ports import BackendError, Instance, ProvisionRequest, Text
from tests.support.environment_processes import environment_command
from tests.support.fake_gateway import task_json
from tests.support.repository import ROOT
from tests.support.waiting import until

SERVER = ROOT / "tests/support/mcp_stdio_server.py"
CONFIG = McpServer(
    transport="stdio", command=(sys.executable, str(SERVER)), read_only_tools=("process_id",)
)


def request(episode_id: str, data_key: str = "monday") -> ProvisionRequest:
    return ProvisionRequest(episode_id, parse_task(task_json(data_id=data_key)), 60.0)


@pytest.fixture
async def backend() -> AsyncGenerator[McpStdioBackend]:
    """A backend whose servers are forks of a process that has imported the SDK."""
    command = environment_command("-m", "tests.support.mcp_stdio_server")
    # A fork is outside of the folder that the process it stands for sees.
    update = {"command": command, "shared_state": True}
    running = McpStdioBackend(CONFIG.model_copy(update=update))
    yield running
    await running.close()


async def started(backend: McpStdioBackend, episode_id: str = "e1") -> Instance:
    instance = await backend.provision_instance(request(episode_id), timeout_s=20.0)
    await instance.list_tools(timeout_s=20.0)
    return instance


async def text(instance: Instance, name: str, **arguments: object) -> str:
    result = await instance.call_tool(name, arguments, timeout_s=10.0)
    return "".join(part.text for part in result.parts if isinstance(part, Text))


async def test_tools_are_listed_with_their_class(backend: McpStdioBackend) -> None:
    instance = await backend.provision_instance(request("e1"), timeout_s=20.0)
    tools = {tool.name: tool for tool in await instance.list_tools(timeout_s=20.0)}
    assert tools["list_notes"].is_repeatable and not tools["add_note"].is_repeatable
    assert tools["process_id"].read_only, "by the configuration's word"
    assert not any(tool.parallel for tool in tools.values())
    assert json.loads(tools["add_note"].input_schema_json)["required"] == ["text"]


async def test_two_calls_of_one_process_are_under_way_together(backend: McpStdioBackend) -> None:
    instance = await started(backend)
    met = await asyncio.gather(text(instance, "meet"), text(instance, "meet"))
    assert met == ["met", "met"]


async def test_each_episode_has_a_process_and_knows_its_task(backend: McpStdioBackend) -> None:
    one, two = await started(backend, "e1"), await started(backend, "e2")
    assert await text(one, "add_note", text="milk") == "2"
    assert await text(two, "add_note", text="eggs") == "2"
    notes = await text(one, "list_notes")
    assert "monday" in notes and "milk" in notes and "eggs" not in notes


async def test_a_repeated_provision_is_the_same_process(backend: McpStdioBackend) -> None:
    one = await started(backend)
    assert await backend.provision_instance(request("e1"), timeout_s=20.0) is one


async def test_a_process_that_has_ended_shows_it_before_any_request(
    backend: McpStdioBackend,
) -> None:
    instance = await started(backend)
    assert instance.end_reason is None
    os.kill(int(await text(instance, "process_id")), signal.SIGKILL)
    await until(lambda: instance.end_reason is not None)


async def test_a_tool_that_fails_is_data(backend: McpStdioBackend) -> None:
    instance = await started(backend)
    result = await instance.call_tool("fail", {}, timeout_s=10.0)
    assert result.is_error and "no ink" in str(result.parts)


async def test_a_call_over_its_time_is_of_unknown_fate_and_the_next_one_works(
    backend: McpStdioBackend,
) -> None:
    instance = await started(backend)
    with pytest.raises(BackendError) as caught:
        await instance.call_tool("sleep", {"seconds": 0.6}, timeout_s=0.2)
    assert (caught.value.kind, caught.value.delivered) == ("timeout", None)
    assert await text(instance, "add_note", text="later") == "2"


async def test_a_server_that_dies_loses_the_instance_and_hangs_no_caller(
    backend: McpStdioBackend,
) -> None:
    instance = await started(backend)
    with pytest.raises(BackendError) as caught:
        await instance.call_tool("crash", {}, timeout_s=10.0)
    assert caught.value.lost and caught.value.delivered is None
    with pytest.raises(BackendError) as caught:
        await instance.call_tool("list_notes", {}, timeout_s=10.0)
    assert caught.value.lost and caught.value.delivered is False


def marked() -> tuple[McpServer, str]:
    """A server with a mark on its command line: its pid is one of its own namespace."""
    mark = uuid.uuid4().hex
    return CONFIG.model_copy(update={"command": (sys.executable, str(SERVER), mark)}), mark


def processes_with(mark: str) -> list[int]:
    return [p.pid for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or ())]


async def test_closing_ends_the_process_and_may_be_repeated() -> None:
    config, mark = marked()
    backend = McpStdioBackend(config)
    instance = await started(backend)
    assert processes_with(mark)
    await instance.close(timeout_s=5.0)
    await instance.close(timeout_s=5.0)
    assert not processes_with(mark)
    await backend.close()


async def test_closing_the_backend_ends_every_process() -> None:
    config, mark = marked()
    backend = McpStdioBackend(config)
    await asyncio.gather(started(backend, "e1"), started(backend, "e2"))
    assert len(processes_with(mark)) >= 2
    await backend.close()
    assert not processes_with(mark)


async def test_a_command_that_is_no_server_is_lost_at_once() -> None:
    backend = McpStdioBackend(McpServer(transport="stdio", command=("true",)))
    instance = await backend.provision_instance(request("e1"), timeout_s=5.0)
    with pytest.raises(BackendError) as caught:
        await instance.list_tools(timeout_s=5.0)
    assert caught.value.lost
    await backend.close()


def test_stdio_without_a_command_is_refused() -> None:
    with pytest.raises(ValueError, match='transport "stdio" needs a command'):
        McpServer(transport="stdio", url="http://127.0.0.1:1")
