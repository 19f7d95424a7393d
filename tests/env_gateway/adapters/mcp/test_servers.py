"""Episodes of several MCP servers: real processes, and one server over HTTP."""

import asyncio
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import parse_config
from flotilla_common.tasks.task_format import parse_task
from flotilla_env_gateway.adapters.mcp.servers import McpServersBackend
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.ports import BackendError, Instance, ProvisionRequest, QueryError
from flotilla_environments.tasks import make_task
from tests.env_gateway.adapters.mcp.server_bench import backend_of, called, folders_of
from tests.support.environment_processes import environment_command
from tests.support.fake_gateway import open_spec, task_json
from tests.support.fake_gateway import opened as opened_at
from tests.support.grading_gateway import grading_gateway, solve
from tests.support.started_process import serving_process
from tests.support.waiting import until

# A server with a tool for each argument: NAME answers the server, and the files of its folder;
# "write" makes a file, "die" ends the process. "listing" fails to list tools.
SERVER = """
import json, os, sys
own, *tools = sys.argv[1:]
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    match asked["method"]:
        case "initialize":
            result = {"protocolVersion": asked["params"]["protocolVersion"],
                "capabilities": {"tools": {}}, "serverInfo": {"name": own, "version": "1"}}
        case "tools/list":
            result = {"tools": [{"name": t, "inputSchema": {"type": "object"}} for t in tools]}
        case _:
            name = asked.get("params", {}).get("name")
            if name == "write":
                open(own, "w").close()
            if name == "die":
                os._exit(1)
            text = f"{own}.{name}: {' '.join(sorted(os.listdir()))}"
            result = {"content": [{"type": "text", "text": text}]}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


def server(name: str, *tools: str, **settings: object) -> dict[str, Any]:
    command = [sys.executable, "-c", SERVER, name, *tools]
    return {"name": name, "transport": "stdio", "command": command, **settings}


def section(*servers: Mapping[str, Any], **settings: object) -> EnvGatewayConfig:
    return parse_config(
        EnvGatewayConfig, {"backend": "mcp", "servers": servers, **settings}, where="spec"
    )


async def opened(backend: McpServersBackend, episode: str = "e1", **task: object) -> Instance:
    request = ProvisionRequest(episode, parse_task(task_json(**task)), 60.0)
    return await backend.provision_instance(request, timeout_s=20.0)


async def names(instance: Instance) -> list[str]:
    return [tool.name for tool in await instance.list_tools(timeout_s=20.0)]


async def test_an_episode_has_the_tools_of_its_servers_in_one_folder_of_its_own(
    tmp_path: Path, temporary: Path
) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.txt").touch()
    files = server("files", "write", "look", template=str(tmp_path / "ours"))
    git = server("git", "look", "log", template=str(tmp_path / "theirs"))
    async with backend_of(section(files, git)) as backend:
        both = ["git", "files"]
        one, other = await asyncio.gather(
            opened(backend, "e1", servers=both), opened(backend, "e2", servers=both)
        )
        assert await names(one) == ["write", "files_look", "git_look", "log"]
        await names(other)
        await called(one, "write")
        assert await called(one, "git_look") == "git.look: files ours.txt theirs.txt"
        assert await called(one, "files_look") == "files.look: files ours.txt theirs.txt"
        assert await called(other, "git_look") == "git.look: ours.txt theirs.txt"
        assert len(folders_of(temporary)) == 2
        await one.close(timeout_s=5.0)
        assert len(folders_of(temporary)) == 1
        await other.close(timeout_s=5.0)
        assert folders_of(temporary) == []


async def test_a_name_that_a_prefix_makes_is_not_another_tools() -> None:
    async with backend_of(section(server("a", "x"), server("b", "x", "a_x"))) as backend:
        instance = await opened(backend, servers=["a", "b"])
        assert await names(instance) == ["a_a_x", "b_x", "a_x"]
        assert (await called(instance, "a_a_x")).startswith("a.x")
        assert (await called(instance, "a_x")).startswith("b.a_x")


async def test_the_task_chooses_before_its_environment_and_one_server_needs_no_choice() -> None:
    two = section(server("a", "x"), server("b", "y"), environments={"fake": {"servers": ["a"]}})
    async with backend_of(two) as backend:
        assert await names(await opened(backend, "e1")) == ["x"]
        assert await names(await opened(backend, "e2", servers=["b"])) == ["y"]
    async with backend_of(section(server("a", "x"))) as backend:
        assert await names(await opened(backend)) == ["x"]


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({}, r"which of the servers a, b .*env_gateway\.environments\.fake\.servers"),
        ({"servers": ["a", "c"]}, r"needs the server 'c'; .*: a, b"),
    ],
)
async def test_a_task_without_servers_or_with_unknown_ones_is_refused_for_good(
    task: dict[str, Any], said: str
) -> None:
    async with backend_of(section(server("a", "x"), server("b", "y"))) as backend:
        with pytest.raises(BackendError, match=said) as caught:
            await opened(backend, **task)
        assert caught.value.invalid and caught.value.delivered is False


async def test_failures_name_the_server_and_leave_nothing(temporary: Path) -> None:
    lost = server("lost", "x", command=["true"])
    wanted = server("web", url="http://127.0.0.1:9/mcp", transport="http")
    del wanted["command"]
    both = ["a", "lost"]
    async with backend_of(section(server("a", "x", "die"), lost, wanted)) as backend:
        instance = await opened(backend, servers=both)
        with pytest.raises(BackendError, match="server lost: "):
            await names(instance)
        await until(lambda: (instance.end_reason or "").startswith("server lost: "))
        await instance.close(timeout_s=5.0)
        instance = await opened(backend, "e2", servers=["a", "web"])
        with pytest.raises(BackendError, match=r"server web: .*cannot be reached"):
            await names(instance)
        with pytest.raises(QueryError, match="none of the servers a, web shows a database"):
            await instance.query_database("current", "SELECT 1", (), timeout_s=1.0)
        await instance.close(timeout_s=5.0)
        assert folders_of(temporary) == []


async def test_a_server_that_lists_no_tools_is_not_left_out_in_silence() -> None:
    async with backend_of(section(server("a", "x"), server("b"))) as backend:
        instance = await opened(backend, servers=["a", "b"])
        with pytest.raises(BackendError, match="server b: no_tools: it lists no tools yet"):
            await names(instance)


async def test_a_server_that_does_not_start_ends_the_others(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "flotilla_env_gateway.adapters.process_namespace.find_bubblewrap", lambda: None
    )
    broken = server("broken", env={"LONG": "x" * 2**18})
    async with backend_of(section(server("a", "x"), broken)) as backend:
        with pytest.raises(BackendError, match=r"server broken: .*too long"):
            await opened(backend, servers=["a", "broken"])
        assert folders_of(temporary) == []


def test_two_templates_with_the_same_file_are_refused_at_the_start(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "inner/note").touch()
    servers = [server(name, template=str(tmp_path / name)) for name in ("one", "two")]
    config = section(*servers, environments={"x": {"servers": ["one", "two"]}})
    with pytest.raises(ConfigError, match=r"servers\.two\.template: inner/note is also in .*'one'"):
        McpServersBackend(config)


@pytest.mark.parametrize("number", [0, 1])
def test_a_program_or_script_that_is_not_there_is_refused_at_the_start(number: int) -> None:
    command = [sys.executable, __file__]
    command[number] = "nowhere/server.py"
    with pytest.raises(ConfigError, match=r"servers\.a\.command: .*nowhere/server\.py in "):
        McpServersBackend(section(server("a", command=command)))


@pytest.fixture
def apps_url() -> Iterator[str]:
    """The URL of a server that shows a database of each instance."""
    command = environment_command("-m", "flotilla_environments.serve", "--port", "0")
    with serving_process(command) as url:
        yield url


async def test_a_verifier_queries_the_one_server_that_shows_a_database(apps_url: str) -> None:
    config = section(server("plain", "look"), {"name": "apps", "url": apps_url, "instances": True})
    task = {**make_task("booking", "train", 0), "servers": ["apps", "plain"]}
    open_one = lambda attempt: opened_at(gateway, open_spec(attempt, task=json.dumps(task)))  # noqa: E731
    async with (
        backend_of(config) as backend,
        grading_gateway({"mcp": backend}, config) as gateway,
    ):
        solved, untouched = await open_one(0), await open_one(1)
        assert {"look", "find_bookings"} <= {*solved.tools}
        await solve(gateway, solved, task)
        for session, reward in ((solved, 1.0), (untouched, 0.0)):
            grade = await gateway.grade_episode(session, "done", None, 30.0)
            assert (grade.reward, grade.reason) == (reward, None)
