"""Calls of one turn from the rollout's loop to a real MCP server over HTTP, through a gateway on
a real socket: read-only calls run together, all others alone, and none twice."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla.env_gateway.v1 import episode_service_pb2_grpc
from flotilla_common.domain.attempts import AttemptKey, StopReason, ToolOutcome
from flotilla_common.rpc import rpc
from flotilla_common.rpc.free_ports import free_address
from flotilla_env_gateway.adapters.mcp.backend import build_mcp_backend
from flotilla_env_gateway.api.episode_service import EpisodeService
from flotilla_env_gateway.config.backends import McpServer
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.ports import Backend
from flotilla_rollout.adapters.env_gateway import GatewayEnvironment, GatewayEpisode
from flotilla_rollout.dialects.turns import PARSE_ERROR, ParseError, ToolCall
from flotilla_rollout.episodes.attempt_limits import AttemptLimits
from flotilla_rollout.episodes.attempt_record import AttemptState
from flotilla_rollout.episodes.call_execution import TurnOutcome, execute_calls
from flotilla_rollout.ports import EnvironmentLost
from flotilla_rollout.types import OpenRequest
from tests.support.fake_gateway import running, task_json
from tests.support.library_server import Library, serving_library
from tests.support.rollout import limits
from tests.support.waiting import until

TOKEN = "parallel-token-0123456789"


class LossyService(EpisodeService):
    """Executes a call and then loses the answer, once for each of `lost`."""

    lost: set[int]

    async def CallTool(self, request: pb.CallToolRequest, context: Any) -> pb.CallToolResponse:
        answer = await super().CallTool(request, context)
        if request.call_seq in self.lost:
            self.lost.remove(request.call_seq)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        return answer


@dataclass(slots=True)
class Turns:
    """An open episode, and the player of its turns."""

    library: Library
    gateway: Gateway
    service: LossyService
    episode: GatewayEpisode
    state: AttemptState

    async def play(self, *calls: str, bounds: AttemptLimits | None = None) -> TurnOutcome:
        """Play a turn of calls such as `read a`, `write b` or `broken`."""
        items = [_call(text) for text in calls]
        return await execute_calls(items, self.episode, self.state, bounds or limits())


def _call(text: str) -> ToolCall | ParseError:
    verb, _, title = text.partition(" ")
    if verb == "broken":
        return ParseError("no JSON")
    name = {"read": "look_up", "write": "lend"}.get(verb, verb)
    return ToolCall(name, json.dumps({"title": title}))


def _shown(outcome: TurnOutcome) -> list[str]:
    return [" ".join(map(str, reply.parts)) for reply in outcome.replies]


@asynccontextmanager
async def closing_backend(backend: Backend) -> AsyncGenerator[Backend]:
    try:
        yield backend
    finally:
        await backend.close()


@asynccontextmanager
async def serving_gateway(
    settings: dict[str, Any], listen: str = "127.0.0.1:0", **changes: Any
) -> AsyncGenerator[tuple[str, LossyService, Gateway]]:
    """Serve a gateway; yield its address, its service and itself."""
    config = McpServer.model_validate(settings)
    server = rpc.server(token=TOKEN)
    async with (
        closing_backend(build_mcp_backend(config, max_calls=64)) as backend,
        running(backend, backend="mcp", servers=[config], **changes) as gateway,
    ):
        service = LossyService(gateway, lambda: None)
        service.lost = set()
        episode_service_pb2_grpc.add_EpisodeServiceServicer_to_server(service, server)
        async with rpc.serving(server, listen, grace_s=0.0) as at:
            yield at.address, service, gateway


@asynccontextmanager
async def opened(address: str) -> AsyncGenerator[GatewayEpisode]:
    request = OpenRequest(AttemptKey("g", 0, 0), task_json(env_id="library"), 1, 30.0)
    async with rpc.channel(address, token=TOKEN) as channel:
        environment = GatewayEnvironment(channel, run_id="r", worker_id="w", renew_interval_s=9.0)
        async with environment.open_episode(request) as episode:
            yield episode
        await environment.wait_until_closed()


@asynccontextmanager
async def playing(library: Library, trust: str = "hinted", **changes: Any) -> AsyncGenerator[Turns]:
    async with serving_library(library) as url:
        settings: dict[str, Any] = {"url": f"{url}/mcp", "parallel_reads": trust}
        if trust == "listed":
            settings["read_only_tools"] = ("look_up",)
        async with (
            serving_gateway(settings, **changes) as (address, service, gateway),
            opened(address) as episode,
        ):
            yield Turns(library, gateway, service, episode, AttemptState(0.0))


@pytest.mark.parametrize("trusted", ["hinted", "listed"])
async def test_two_reads_of_a_turn_are_under_way_together(trusted: str) -> None:
    """Neither is answered before the other has arrived."""
    async with playing(Library(together=2), trusted) as it:
        outcome = await it.play("read a", "read b")
        assert _shown(outcome) == ["found a", "found b"]
        assert it.library.executed == {"a": 1, "b": 1}


async def test_a_servers_hint_is_not_trusted_unless_the_settings_allow_it() -> None:
    async with playing(Library(), "off") as it:
        outcome = await it.play("read a", "read b")
        assert _shown(outcome) == ["found a", "found b"]
        assert it.library.log == ["+a", "-a", "+b", "-b"]
        assert [tool.read_only for tool in it.episode.info.tools] == [True, False]


async def test_a_write_is_alone_and_the_replies_are_in_the_order_of_the_calls() -> None:
    async with playing(Library()) as it:
        calls = ["read a", "read b", "write c", "read d", "broken", "read e", "write f", "write g"]
        outcome = await it.play(*calls)
        shown = [
            "found a",
            "found b",
            "lent c",
            "found d",
            "no JSON",
            "found e",
            "lent f",
            "lent g",
        ]
        assert _shown(outcome) == shown
        assert outcome.replies[4].outcome == PARSE_ERROR
        assert it.library.overlaps == []
        starts = [entry for entry in it.library.log if entry in ("+c", "+d", "+e", "+f", "+g")]
        assert starts == ["+c", "+d", "+e", "+f", "+g"]
        assert it.library.log.index("-c") < it.library.log.index("+d")


async def test_more_reads_than_the_contract_bears_go_in_two_parts() -> None:
    async with playing(Library(together=16)) as it:
        titles = [f"t{number}" for number in range(20)]
        outcome = await it.play(*(f"read {title}" for title in titles))
        assert _shown(outcome) == [f"found {title}" for title in titles]
        assert it.library.most_readers == 16


async def test_the_calls_of_an_attempt_are_counted_one_by_one() -> None:
    async with playing(Library()) as it:
        outcome = await it.play("read a", "read b", "read c", bounds=limits(calls=2))
        assert (outcome.stop, _shown(outcome)) == (StopReason.MAX_CALLS, ["found a", "found b"])
        assert (it.state.counts.tool_calls, it.library.executed.total()) == (2, 2)
        outcome = await it.play("read a", "read b", bounds=limits(calls=2))
        assert (outcome.stop, it.library.executed.total()) == (StopReason.MAX_CALLS, 2)


async def test_each_call_takes_a_place_at_the_environments_gate() -> None:
    async with playing(Library(together=2), environments={"library": {"max_calls": 2}}) as it:
        outcome = await it.play(*(f"read t{number}" for number in range(8)))
        assert len(outcome.replies) == 8
        assert it.library.most_readers == 2


@pytest.mark.parametrize("lost", [{0}, {1}, {0, 1}])
async def test_a_read_whose_answer_is_lost_is_requested_again_and_executed_once(
    lost: set[int],
) -> None:
    async with playing(Library(together=2)) as it:
        it.service.lost = lost
        outcome = await it.play("read a", "read b", "write c")
        assert _shown(outcome) == ["found a", "found b", "lent c"]
        assert it.library.executed == {"a": 1, "b": 1, "c": 1}


async def test_a_lost_environment_ends_the_other_calls_and_leaves_no_task() -> None:
    async with playing(Library()) as it:
        it.library.hold.clear()
        before = asyncio.all_tasks()
        turn = asyncio.create_task(it.play("read a", "read b", "read c", "write d"))
        await until(lambda: it.library.inside == 3)
        it.gateway.close(it.episode.info.episode_id)
        with pytest.raises(EnvironmentLost, match="EPISODE_LOST"):
            await turn
        ours = {task for task in asyncio.all_tasks() - before if "_call_tool" in repr(task)}
        assert ours == set()
        assert "d" not in it.library.executed


async def test_time_that_runs_out_ends_all_calls_and_the_grade_waits_for_their_end() -> None:
    async with playing(Library()) as it:
        it.library.hold.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await it.play("read a", "read b")
        assert not [task for task in asyncio.all_tasks() if "_call_tool" in repr(task)]
        grade = asyncio.create_task(it.episode.request_grade(None, b"", 5.0))
        await asyncio.sleep(0.02)
        assert not grade.done()
        it.library.hold.set()
        assert (await grade).reward == 1.0
        assert it.library.executed == {"a": 1, "b": 1}


async def test_reads_that_hang_end_each_with_its_own_deadline() -> None:
    async with playing(Library()) as it:
        it.library.hold.clear()
        outcome = await it.play("read a", "read b", bounds=limits(call_timeout_s=0.2))
        assert [reply.outcome for reply in outcome.replies] == [ToolOutcome.DEADLINE] * 2
        it.library.hold.set()
        assert (await it.episode.request_grade(None, b"", 5.0)).reward == 1.0


async def test_a_gateway_that_restarts_in_the_middle_loses_the_turn_whole(
    tmp_path: Path,
) -> None:
    """Its episodes are gone: no answer is guessed, and no call is made a second time."""
    library, journal = Library(), tmp_path / "gateway.sqlite"
    library.hold.clear()
    async with serving_library(library) as url, AsyncExitStack() as second:
        settings = {"url": f"{url}/mcp", "parallel_reads": "hinted"}
        address = free_address()
        first = serving_gateway(settings, address, journal=journal, incarnation="one")
        async with AsyncExitStack() as until_restart:
            await until_restart.enter_async_context(first)
            episode = await second.enter_async_context(opened(address))
            calls = [_call("read a"), _call("read b")]
            turn = asyncio.create_task(execute_calls(calls, episode, AttemptState(0.0), limits()))
            await until(lambda: library.inside == 2)
        again = serving_gateway(settings, address, journal=journal, incarnation="two")
        # The closing of the lost episode is answered too.
        async with again:
            with pytest.raises(EnvironmentLost, match="EPISODE_LOST"):
                await turn
            await second.aclose()
        assert library.executed == {"a": 1, "b": 1}
