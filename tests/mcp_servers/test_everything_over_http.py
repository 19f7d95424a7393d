"""The public server "everything" over HTTP, which all episodes share."""

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from tests.mcp_servers.everything_server import HTTP_KINDS, EverythingServer, everything_server
from tests.mcp_servers.left_behind import assert_soon
from tests.mcp_servers.playing import (
    Part,
    assert_rewards,
    connected,
    deal_parts,
    play_alone,
    play_together,
)
from tests.mcp_servers.public_tasks import EVERYTHING
from tests.support.gateway_process import gateway_process, serving_process

pytestmark = pytest.mark.mcp_servers

EPISODES = 20
SUM = Part(EVERYTHING[0], EVERYTHING[0].right)


def write_section(server: EverythingServer) -> str:
    return f"""
[env_gateway]
backend = "mcp"
[[env_gateway.servers]]
transport = "{server.kind.transport}"
url = "{server.url}"
[env_gateway.verifiers]
unsafe_local_verifiers = true
"""


@pytest.mark.parametrize("kind", HTTP_KINDS)
async def test_each_of_twenty_concurrent_episodes_earns_its_own_reward(
    kind: str, tmp_path: Path
) -> None:
    parts, rewards = deal_parts(EVERYTHING, EPISODES)
    with everything_server(kind, tmp_path) as server:
        async with serving_process(tmp_path, write_section(server)) as (_, address):
            with connected(address) as connection:
                played = await play_together(connection, parts)
            await assert_soon(server.count_sessions, (EPISODES, EPISODES))
    assert_rewards(played, rewards)


@pytest.mark.parametrize("kind", HTTP_KINDS)
async def test_a_server_that_is_killed_and_started_again_in_mid_episode_gives_no_reward(
    kind: str, tmp_path: Path
) -> None:
    with everything_server(kind, tmp_path) as server:
        killing = Part(SUM.task, SUM.play, kill=lambda _: server.restart())
        async with serving_process(tmp_path, write_section(server)) as (_, address):
            with connected(address) as connection:
                killed = await play_alone(connection, killing)
                after = await play_alone(connection, SUM)
    first, second = killed.answers
    assert first.failure is None and "lost" in (second.failure or "")
    assert killed.grade.no_grade.startswith("instance_lost")
    assert (killed.grade.reward, after.grade.reward) == (None, 1.0)


async def test_a_call_after_a_restart_ends_as_session_lost(tmp_path: Path) -> None:
    with everything_server("streamableHttp", tmp_path) as server:
        async with gateway_process(tmp_path, write_section(server)) as (_, stub):
            episode_id = await _open_echo(stub)
            first = await _echo(stub, episode_id, 0, "one")
            server.restart()
            second = await _echo(stub, episode_id, 1, "two")
            header = pb.GradeHeader(episode_id=episode_id)
            grade = await stub.Grade(iter([pb.GradeRequest(header=header)]))
            await stub.CloseEpisode(pb.CloseEpisodeRequest(episode_id=episode_id))
    assert first.outcome == pb.TOOL_OUTCOME_OK
    assert second.outcome == pb.TOOL_OUTCOME_SESSION_LOST
    assert grade.WhichOneof("grade") == "no_grade"
    assert grade.no_grade.reason == pb.NO_GRADE_REASON_INSTANCE_LOST


async def _open_echo(stub: Any) -> str:
    """Open an episode whose verifier gives 0 without a look at the server."""
    verifier = "def verify(env):\n    return 0\n"
    task = {"key": "echo", "env_id": "public", "prompt": "Echo.", "verifier_func": verifier}
    request = pb.OpenEpisodeRequest(
        request_id="echo",
        run_id="run",
        group_id="echo",
        opening=1,
        task_json=json.dumps(task),
        worker_id="worker",
    )
    states = [state async for state in stub.OpenEpisode(request)]
    return states[-1].episode_id


async def _echo(stub: Any, episode_id: str, seq: int, message: str) -> pb.CallToolResponse:
    arguments = json.dumps({"message": message})
    call = pb.CallToolRequest(
        episode_id=episode_id, call_seq=seq, name="echo", arguments_json=arguments
    )
    return await stub.CallTool(call)
