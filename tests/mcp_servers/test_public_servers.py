"""Public MCP servers over stdio, in twenty concurrent episodes with a server process each."""

import json
import uuid
from itertools import cycle, islice
from pathlib import Path

import pytest

from tests.mcp_servers.left_behind import assert_soon, find_processes, kill_server, list_folders
from tests.mcp_servers.playing import Part, connected, play_together
from tests.mcp_servers.public_servers import SERVERS, PublicServer
from tests.mcp_servers.public_tasks import Play
from tests.support.gateway_process import serving_process

pytestmark = pytest.mark.mcp_servers

EPISODES = 20
MARK = "FLOTILLA_PUBLIC_TEST"


def write_section(server: PublicServer, mark: str, template: Path) -> str:
    """Write the gateway's table of a run spec for a server, with its template if it needs one."""
    variables = {**server.env, MARK: mark}
    filled = ""
    if server.fill is not None:
        template.mkdir()
        server.fill(template)
        filled = f"template = {json.dumps(str(template))}"
    return f"""
[env_gateway]
backend = "mcp"
[env_gateway.backends.mcp]
transport = "stdio"
command = {json.dumps(list(server.command))}
env = {{ {", ".join(f"{name} = {json.dumps(value)}" for name, value in variables.items())} }}
read_only_tools = {json.dumps(list(server.read_only_tools))}
{filled}
[env_gateway.verifiers]
unsafe_local_verifiers = true
"""


@pytest.mark.parametrize("name", [name for name, each in SERVERS.items() if each.fill is None])
async def test_each_of_twenty_concurrent_episodes_earns_its_own_reward(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, mark = SERVERS[name], uuid.uuid4().hex
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    section = write_section(server, mark, tmp_path / "template")
    plays = [
        (Part(task, play), reward)
        for task in server.tasks
        for play, reward in ((task.right, 1.0), (Play(), 0.0), (task.wrong, 0.0))
    ]
    episodes = list(islice(cycle(plays), EPISODES - 1))
    victim = Part(server.tasks[0], server.tasks[0].right, kill=kill_server)
    async with serving_process(tmp_path, section) as (_, address):
        before = list_folders(tmp_path)
        with connected(address) as connection:
            *played, killed = await play_together(
                connection, [*(part for part, _ in episodes), victim]
            )
        assert [(each.grade.reward, each.grade.no_grade) for each in played] == [
            (reward, "") for _, reward in episodes
        ]
        assert [
            answer.failure for each in played for answer in each.answers if answer.failure
        ] == []
        assert (killed.answers[0].failure, killed.grade.reward) == (None, None)
        assert killed.grade.no_grade.startswith("instance_lost")
        await assert_soon(lambda: list(find_processes(MARK, mark)), [])
        await assert_soon(lambda: list_folders(tmp_path), before)
