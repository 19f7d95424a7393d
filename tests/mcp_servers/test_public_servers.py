"""Public MCP servers over stdio, in twenty concurrent episodes with a server process each."""

import json
import uuid
from pathlib import Path

import pytest

from flotilla_env_gateway.ports import Media
from tests.mcp_servers.left_behind import assert_soon, find_processes, kill_server, list_folders
from tests.mcp_servers.playing import (
    Part,
    assert_rewards,
    connected,
    deal_parts,
    play_alone,
    play_together,
)
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
[[env_gateway.servers]]
transport = "stdio"
command = {json.dumps(list(server.command))}
env = {{ {", ".join(f"{name} = {json.dumps(value)}" for name, value in variables.items())} }}
read_only_tools = {json.dumps(list(server.read_only_tools))}
{filled}
[env_gateway.verifiers]
unsafe_local_verifiers = true
"""


@pytest.mark.parametrize("name", SERVERS)
async def test_each_of_twenty_concurrent_episodes_earns_its_own_reward(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, mark = SERVERS[name], uuid.uuid4().hex
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    section = write_section(server, mark, tmp_path / "template")
    parts, rewards = deal_parts(server.tasks, EPISODES - 1)
    in_between: set[str] = set()

    def kill(task_key: str) -> None:
        in_between.update(list_folders(tmp_path))
        kill_server(task_key)

    victim = Part(server.tasks[0], server.tasks[0].right, kill=kill)
    async with serving_process(tmp_path, section) as (_, address):
        before = list_folders(tmp_path)
        with connected(address) as connection:
            *played, killed = await play_together(connection, [*parts, victim])
        assert_rewards(played, rewards)
        assert (killed.answers[0].failure, killed.grade.reward) == (None, None)
        assert killed.grade.no_grade.startswith(("instance_lost: ", "tainted: "))
        await assert_soon(lambda: list(find_processes(MARK, mark)), [])
        assert in_between > before
        await assert_soon(lambda: list_folders(tmp_path), before)


async def test_what_one_episode_remembers_is_not_there_in_the_next(tmp_path: Path) -> None:
    server = SERVERS["memory"]
    remember = server.tasks[0]
    section = write_section(server, uuid.uuid4().hex, tmp_path / "template")
    async with serving_process(tmp_path, section) as (_, address):
        with connected(address) as connection:
            plays = (remember.right, Play(), remember.right)
            played = [await play_alone(connection, Part(remember, play)) for play in plays]
    assert_rewards(played, [1.0, 0.0, 1.0])


async def test_a_picture_of_a_tool_arrives_as_the_server_sent_it(tmp_path: Path) -> None:
    server = SERVERS["everything"]
    section = write_section(server, uuid.uuid4().hex, tmp_path / "template")
    async with serving_process(tmp_path, section) as (_, address):
        with connected(address) as connection:
            look = Play([("get-tiny-image", {})])
            played = await play_alone(connection, Part(server.tasks[0], look))
    (answer,) = played.answers
    (picture,) = [part for part in answer.parts if isinstance(part, Media)]
    assert (picture.mime, picture.data[:4]) == ("image/png", b"\x89PNG")
    assert picture.width and picture.height and len(answer.parts) == 3
