"""Episodes of public MCP servers, played with the client library at a gateway."""

import asyncio
import json
import uuid
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, TypeVar

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla_common.rpc import rpc
from flotilla_env_gateway.clients.connection import (
    GatewayConnection,
    borrow_connection,
    return_connection,
)
from flotilla_env_gateway.clients.episode import (
    EpisodeClient,
    EpisodeGrade,
    ToolAnswer,
    open_episode,
)
from tests.mcp_servers.public_tasks import Play, PublicTask
from tests.support.gateway_process import TOKEN

T = TypeVar("T")

_OPEN_S = 60.0
_CALL_S = 30.0
_GRADE_S = 30.0
# Called with the key of an episode's task, which the environment of its server holds.
Kill = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class Part:
    """An episode to play. `kill` is called after its first call, and that call made again."""

    task: PublicTask
    play: Play
    kill: Kill | None = None


@dataclass(frozen=True, slots=True)
class Played:
    """The answers to the calls of an episode, and its grade."""

    answers: Sequence[ToolAnswer]
    grade: EpisodeGrade


def deal_parts(tasks: Sequence[PublicTask], count: int) -> tuple[list[Part], list[float]]:
    """Return as many episodes of the tasks, each played right, not at all and wrong in turn, and
    the reward that each has to earn."""
    ways = [
        (Part(task, play), reward)
        for task in tasks
        for play, reward in ((task.right, 1.0), (Play(), 0.0), (task.wrong, 0.0))
    ]
    dealt = list(islice(cycle(ways), count))
    return [part for part, _ in dealt], [reward for _, reward in dealt]


def assert_rewards(played: Sequence[Played], rewards: Sequence[float]) -> None:
    """Assert that all calls were answered, and each episode earned its reward."""
    grades = [(each.grade.reward, each.grade.no_grade) for each in played]
    assert grades == [(reward, "") for reward in rewards]
    assert [answer.failure for each in played for answer in each.answers if answer.failure] == []


@contextmanager
def connected(address: str) -> Generator[GatewayConnection]:
    connection = borrow_connection(address, TOKEN)
    try:
        yield connection
    finally:
        return_connection(connection)


async def play_together(connection: GatewayConnection, parts: Sequence[Part]) -> list[Played]:
    """Play episodes, each of which is open before any of them makes a call."""
    opened = asyncio.Barrier(len(parts))
    return await _run_there(connection, _play_parts(connection, parts, opened))


async def play_alone(connection: GatewayConnection, part: Part) -> Played:
    [played] = await play_together(connection, [part])
    return played


async def _run_there(connection: GatewayConnection, work: Coroutine[Any, Any, T]) -> T:
    return await asyncio.wrap_future(connection.submit_coroutine(work))


async def _play_parts(
    connection: GatewayConnection, parts: Sequence[Part], opened: asyncio.Barrier
) -> list[Played]:
    async with asyncio.TaskGroup() as group:
        playing = [group.create_task(_play_part(connection, part, opened)) for part in parts]
    return [each.result() for each in playing]


async def _play_part(connection: GatewayConnection, part: Part, opened: asyncio.Barrier) -> Played:
    key = f"public-{uuid.uuid4().hex}"
    episode = await open_episode(
        connection, _open_request(part.task, key, connection.worker_id), _OPEN_S
    )
    try:
        await opened.wait()
        answers: list[ToolAnswer] = []
        if part.kill is not None:
            answers.append(await _call(episode, part.play, 0))
            part.kill(key)
        for number in range(len(part.play.calls)):
            answers.append(await _call(episode, part.play, number))
        grade = await episode.grade_episode(part.play.answer, None, _GRADE_S)
        return Played(answers, grade)
    finally:
        await episode.close()


async def _call(episode: EpisodeClient, play: Play, number: int) -> ToolAnswer:
    name, arguments = play.calls[number]
    return await episode.call_tool(name, arguments, _CALL_S)


def _open_request(task: PublicTask, key: str, worker_id: str) -> pb.OpenEpisodeRequest:
    verifier = f"def verify(env, final_answer=None):{task.verifier}"
    task_fields = {"key": key, "env_id": "public", "prompt": task.prompt, "verifier_func": verifier}
    return pb.OpenEpisodeRequest(
        request_id=key,
        run_id="run",
        group_id=key,
        opening=1,
        task_json=json.dumps(task_fields),
        worker_id=worker_id,
        budget=rpc.to_duration(_OPEN_S + _GRADE_S),
    )
