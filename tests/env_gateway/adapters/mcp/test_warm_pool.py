"""Servers over stdio that are started ahead: real processes."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_common.tasks.task_format import parse_task
from flotilla_env_gateway.adapters.mcp.servers import McpServersBackend
from flotilla_env_gateway.adapters.process_usage import measure_usage
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.ports import BackendError, Instance, PoolState, ProvisionRequest
from tests.env_gateway.adapters.mcp.server_bench import backend_of, called, folders_of
from tests.support.fake_gateway import task_json
from tests.support.waiting import until

# Tools: "look" answers how many calls this process has had, the task's data key and the files;
# "write" makes a file; "fail" and "hang" do that; "reset" counts from 0 again; "late" is there from
# the second listing on, which the server says. A start takes more CPU time than the 10 ms that the
# kernel counts by.
SERVER = """
import json, os, sys, time
while time.process_time() < 0.03: pass
calls = lists = 0
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    result = {}
    match asked["method"]:
        case "initialize":
            result = {"protocolVersion": asked["params"]["protocolVersion"],
                "capabilities": {"tools": {}}, "serverInfo": {"name": "own", "version": "1"}}
        case "tools/list":
            tools = [t for t in sys.argv[1:] if lists or t != "late"]
            lists += 1
            result = {"tools": [{"name": t, "inputSchema": {"type": "object"}} for t in tools]}
        case "tools/call":
            name = asked["params"]["name"]
            calls = 0 if name == "reset" else calls + 1
            if name == "write":
                open("written", "w").close()
            if name == "hang":
                time.sleep(60)
            files = " ".join(sorted(os.listdir(os.environ["EPISODE"])))
            text = f"{calls} {os.environ.get('FLOTILLA_DATA_KEY')} {files}"
            result = {"content": [{"type": "text", "text": text}], "isError": name == "fail"}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
    if "late" in sys.argv and asked["method"] == "tools/list" and lists == 1:
        changed = "notifications/tools/list_changed"
        print(json.dumps({"jsonrpc": "2.0", "method": changed}), flush=True)
"""
TOOLS = ("look", "write", "hang", "reset", "fail")


def section(*, tools: tuple[str, ...] = TOOLS, **settings: object) -> EnvGatewayConfig:
    warm = {"size": 2, "starts_per_s": 100.0, **settings.pop("warm", {})}  # type: ignore[dict-item]
    server = {
        "transport": "stdio",
        "command": [sys.executable, "-c", SERVER, *tools],
        "task_variables": False,
        "env": {"EPISODE": "{episode_dir}"},
        **settings,
    }
    spec = {"backend": "mcp", "servers": [server], "warm_starts": warm}
    return parse_config(EnvGatewayConfig, spec, where="spec")


async def provisioned(backend: McpServersBackend, episode: str = "e1") -> Instance:
    request = ProvisionRequest(episode, parse_task(task_json(data_id="monday")), 60.0)
    return await backend.provision_instance(request, timeout_s=20.0)


async def opened(backend: McpServersBackend, episode: str = "e1") -> Instance:
    instance = await provisioned(backend, episode)
    await instance.list_tools(timeout_s=20.0)
    return instance


def servers_running() -> list[int]:
    """The pids of this test's servers (not of what runs them)."""
    found: list[int] = []
    for process in psutil.Process().children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if words[:2] == [sys.executable, "-c"] and words[2:3] == [SERVER]:
            found.append(process.pid)
    return found


async def filled(backend: McpServersBackend, ready: int = 2) -> None:
    await until(lambda: backend.warm_pools == [PoolState("server", ready, 2)])


async def test_an_episode_gets_servers_that_are_ready_and_another_one_takes_their_place(
    temporary: Path,
) -> None:
    async with backend_of(section()) as backend:
        await filled(backend)
        ready = set(servers_running())
        instance = await opened(backend)
        assert await called(instance, "look") == "1 None ", "it gets nothing of the task"
        await filled(backend)
        assert ready < set(servers_running())
        await instance.close(timeout_s=10.0)
        assert len(servers_running()) == 2, "without a reset nothing is used twice"
    assert servers_running() == [] and folders_of(temporary) == []


async def test_beyond_the_pool_an_episode_starts_its_own_servers() -> None:
    async with backend_of(section(warm={"starts_per_s": 0.001})) as backend:
        await filled(backend, 1)
        several = await asyncio.gather(*(opened(backend, f"e{n}") for n in range(3)))
        assert [await called(each, "look") for each in several] == ["1 None "] * 3


async def test_an_episode_opens_without_asking_servers_that_have_listed_their_tools() -> None:
    async with backend_of(section()) as backend:
        await filled(backend)
        for server in servers_running():
            os.kill(server, signal.SIGSTOP)
        instance = await provisioned(backend)
        assert [tool.name for tool in await instance.list_tools(timeout_s=0.5)] == [*TOOLS]
        with pytest.raises(BackendError, match="no answer to tools/list"):
            await instance.list_tools(timeout_s=0.5)


async def test_tools_that_change_while_their_server_waits_are_listed_again() -> None:
    async with backend_of(section(tools=("look", "late"))) as backend:
        await filled(backend)
        instance = await provisioned(backend)
        tools = await instance.list_tools(timeout_s=10.0)
        assert [tool.name for tool in tools] == ["look", "late"]


async def test_a_server_that_serves_again_has_listed_its_tools_again() -> None:
    config = section(tools=("look", "late", "reset"), reset_tool="reset", warm={"size": 1})
    async with backend_of(config) as backend:
        await until(lambda: backend.warm_pools == [PoolState("server", 1, 1)])
        await (await provisioned(backend)).close(timeout_s=10.0)
        stopped = servers_running()
        for server in stopped:
            os.kill(server, signal.SIGSTOP)
        tools = await (await provisioned(backend, "e2")).list_tools(timeout_s=0.5)
        for server in stopped:
            os.kill(server, signal.SIGCONT)
        assert [tool.name for tool in tools] == ["look", "late"]


async def test_a_server_that_died_while_it_waited_is_not_handed_out() -> None:
    async with backend_of(section()) as backend:
        await filled(backend)
        dead = servers_running()
        for pid in dead:
            os.kill(pid, signal.SIGKILL)
        await filled(backend, 0)
        assert await called(await opened(backend), "look") == "1 None "
        assert not set(dead) & set(servers_running())


async def test_a_server_with_a_reset_serves_the_next_episode_as_new(tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.mkdir()
    (template / "seed").touch()
    config = section(reset_tool="reset", template=str(template), warm={"size": 1})
    async with backend_of(config) as backend:
        await until(lambda: backend.warm_pools[0].ready == 1)
        first = await opened(backend, "e1")
        assert [tool.name for tool in await first.list_tools(timeout_s=5.0)] == [
            tool for tool in TOOLS if tool != "reset"
        ]
        await called(first, "write")
        assert await called(first, "look") == "2 None seed written"
        pids = servers_running()
        # Closing is under way when the next one opens, which waits for it.
        closing = asyncio.create_task(first.close(timeout_s=10.0))
        await asyncio.sleep(0)
        second = await opened(backend, "e2")
        await closing
        assert servers_running() == pids, "it is expected back, and not replaced"
        assert await called(second, "look") == "1 None seed"
        # One that started with its episode, since the pool was empty, fills no second place.
        third = await opened(backend, "e3")
        assert await called(third, "look") == "1 None seed"
        await second.close(timeout_s=10.0)
        await third.close(timeout_s=10.0)
        assert servers_running() == pids


async def test_a_place_that_a_given_server_fills_while_a_start_waits_for_quiet_is_filled_once() -> (
    None
):
    async with backend_of(section(state_in_folder=True, warm={"size": 1})) as backend:
        await until(lambda: backend.warm_pools[0].ready == 1)
        (warm,) = servers_running()
        lent, own = [await opened(backend, episode) for episode in ("lent", "own")]
        await lent.close(timeout_s=10.0)
        dying = await opened(backend, "dying")
        os.kill(warm, signal.SIGKILL)
        await dying.close(timeout_s=10.0)
        await own.close(timeout_s=10.0)
        # A start begins half a second after the last episode has taken something.
        await asyncio.sleep(1.0)
        assert backend.warm_pools[0].ready == len(servers_running()) == 1


async def test_a_server_that_keeps_only_its_folder_needs_no_tool_to_serve_the_next_episode() -> (
    None
):
    async with backend_of(section(state_in_folder=True, warm={"size": 1})) as backend:
        await until(lambda: backend.warm_pools[0].ready == 1)
        first = await opened(backend, "e1")
        await called(first, "write")
        await first.close(timeout_s=10.0)
        assert await called(await opened(backend, "e2"), "look") == "2 None "


@pytest.mark.parametrize("why", ["failed", "unanswered", "dead"])
async def test_servers_that_may_not_be_as_new_are_ended(why: str) -> None:
    reset = "fail" if why == "failed" else "reset"
    config = section(reset_tool=reset, warm={"size": 1, "starts_per_s": 0.001})
    async with backend_of(config) as backend:
        await until(lambda: backend.warm_pools[0].ready == 1)
        instance = await opened(backend)
        (pid,) = servers_running()
        if why == "unanswered":
            with pytest.raises(BackendError, match="no answer"):
                await called(instance, "hang", timeout_s=0.2)
        if why == "dead":
            os.kill(pid, signal.SIGKILL)
        await instance.close(timeout_s=20.0)
        assert backend.warm_pools[0].ready == 0 and servers_running() == []


async def test_the_memory_of_servers_that_wait_is_bounded() -> None:
    with capture_logs() as logs:
        async with backend_of(section(warm={"memory_mib": 1})) as backend:
            await filled(backend, 1)
            await asyncio.sleep(0.5)
            await filled(backend, 1)
            assert 2**20 < measure_usage(servers_running()).memory_bytes < 100 * 2**20
    (said,) = [each for each in logs if each["event"] == "warm_servers_bound_by_memory"]
    assert said["ready"] == 1 and said["memory_mib"] == 1


async def test_the_first_start_tells_what_it_costs() -> None:
    with capture_logs() as logs:
        async with backend_of(section(warm={"size": 0})) as backend:
            await opened(backend, "e1")
            await opened(backend, "e2")
    (said,) = [each for each in logs if each["event"] == "servers_started"]
    assert said["servers"] == "server" and 0 < said["cpu_s"] < 10 and said["seconds"] > 0
    assert 1 <= said["mib"] < 100


async def test_starts_that_fail_are_told_and_tried_again() -> None:
    with capture_logs() as logs:
        async with backend_of(section(reset_tool="reste")):
            await until(lambda: len(logs) > 1)
    assert [each["event"] for each in logs[:2]] == ["warm_start_failed"] * 2
    assert "server server: it has no tool 'reste' (reset_tool)" in logs[0]["error"]
    assert servers_running() == []


async def test_servers_that_get_variables_of_the_task_start_with_it() -> None:
    with capture_logs() as logs:
        async with backend_of(section(task_variables=True)) as backend:
            assert backend.warm_pools == []
            assert await called(await opened(backend), "look") == "1 monday "
    (said,) = [each for each in logs if each["event"] == "servers_not_started_ahead"]
    assert said["why"] == "task_variables is true for server"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"task_variables": True, "reset_tool": "reset"}, "need task_variables = false"),
        ({"shared_state": True, "state_in_folder": True}, "state_in_folder is false"),
        (
            {"transport": "http", "command": None, "url": "http://127.0.0.1:9", "env": {}},
            'task_variables, state_in_folder and reset_tool need transport "stdio"',
        ),
    ],
)
def test_settings_that_cannot_hold_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        section(**settings)
