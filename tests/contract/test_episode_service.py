"""EpisodeService with a real client over a real socket, on fake environments."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla.env_gateway.v1 import episode_service_pb2_grpc
from flotilla_common.rpc import rpc
from flotilla_common.rpc.errors import ServiceError
from flotilla_env_gateway.api.episode_service import EpisodeService, most_streams
from flotilla_env_gateway.episodes.gateway import Gateway
from flotilla_env_gateway.ports import (
    BackendError,
    CallResult,
    Execution,
    Instance,
    Media,
    Text,
    Tool,
)
from tests.support.fake_environments import FakeGrader, ScriptedBackend
from tests.support.fake_gateway import running, task_json
from tests.support.waiting import until

TOKEN = "contract-token-0123456789"


class EpisodeClient:
    """The stub, and the messages that these tests send."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        gateway: Gateway,
        service: EpisodeService,
        drained: asyncio.Event,
    ) -> None:
        self.stub: Any = episode_service_pb2_grpc.EpisodeServiceStub(channel)
        self.gateway = gateway
        self.service = service
        self.drained = drained

    def opening(self, attempt: int = 0, **changes: Any) -> Any:
        fields: dict[str, Any] = {
            "request_id": f"request-{attempt}",
            "run_id": "run",
            "group_id": "group",
            "attempt_index": attempt,
            "opening": 1,
            "task_json": task_json(),
            "worker_id": "rollout-0",
        }
        return self.stub.OpenEpisode(pb.OpenEpisodeRequest(**(fields | changes)))

    async def open(self, attempt: int = 0, **changes: Any) -> list[pb.OpenEpisodeResponse]:
        return [response async for response in self.opening(attempt, **changes)]

    async def call(
        self, episode_id: str, seq: int, name: str = "add", arguments: str = "{}"
    ) -> pb.CallToolResponse:
        return await self.stub.CallTool(
            pb.CallToolRequest(
                episode_id=episode_id,
                call_seq=seq,
                name=name,
                arguments_json=arguments,
                deadline=rpc.to_duration(5.0),
            )
        )

    async def grade(self, episode_id: str, *chunks: bytes) -> pb.GradeResponse:
        async def requests() -> AsyncIterator[pb.GradeRequest]:
            header = pb.GradeHeader(
                episode_id=episode_id,
                deadline=rpc.to_duration(5.0),
                transcript_bytes=sum(map(len, chunks)),
            )
            yield pb.GradeRequest(header=header)
            for chunk in chunks:
                yield pb.GradeRequest(transcript_chunk=chunk)

        return await self.stub.Grade(requests())


@asynccontextmanager
async def serving(
    backend: ScriptedBackend, grader: FakeGrader | None = None, **changes: Any
) -> AsyncGenerator[EpisodeClient]:
    drained = asyncio.Event()
    async with running(backend, grader, **changes) as gateway:
        server = rpc.server(token=TOKEN, most_streams=most_streams(gateway.config.limits))
        service = EpisodeService(gateway, drained.set)
        episode_service_pb2_grpc.add_EpisodeServiceServicer_to_server(service, server)
        async with (
            rpc.serving(server, "127.0.0.1:0", grace_s=0.1) as at,
            rpc.channel(at.address, token=TOKEN) as channel,
        ):
            yield EpisodeClient(channel, gateway, service, drained)


@asynccontextmanager
async def refused(code: grpc.StatusCode, reason: str) -> AsyncGenerator[list[ServiceError]]:
    """Check that the call in the block is refused so; the error is in the list afterwards."""
    errors: list[ServiceError] = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield errors
    error = rpc.service_error(caught.value)
    assert error is not None, caught.value
    assert (error.code, error.reason) == (code, reason)
    errors.append(error)


async def test_an_episode_opens_calls_grades_and_closes() -> None:
    backend = ScriptedBackend()
    async with serving(backend) as client:
        states = await client.open()
        ready = states[-1].ready
        episode_id = states[0].episode_id

        assert [s.state for s in states][-1] == pb.EPISODE_STATE_READY
        assert [tool.name for tool in ready.tools] == ["look", "add"]
        assert ready.facts.prompt == "Count to one."
        assert ready.facts.current_date == "2026-02-14"
        assert dict(ready.facts.variables) == {"LOGGED_IN_USER": "Ada"}

        answer = await client.call(episode_id, 0)
        assert answer.outcome == pb.TOOL_OUTCOME_OK
        assert answer.parts[0].text == "1"

        grade = await client.grade(episode_id)
        assert grade.WhichOneof("grade") == "reward"
        assert grade.reward == 1.0

        await client.stub.CloseEpisode(pb.CloseEpisodeRequest(episode_id=episode_id))
        await client.stub.CloseEpisode(pb.CloseEpisodeRequest(episode_id=episode_id))
    assert backend.running == {}


@pytest.mark.parametrize(
    ("kind", "offered", "tools", "is_at_fault"),
    [
        ("bad_task", ["add"], ["add"], True),
        ("auth", ["add"], ["add"], False),
        ("", ["teleport"], ["add"], True),
        ("", ["teleport"], [], False),
    ],
)
async def test_a_failed_opening_says_whether_the_task_is_at_fault(
    kind: str, offered: list[str], tools: list[str], *, is_at_fault: bool
) -> None:
    backend = ScriptedBackend()
    backend.tools = tuple(Tool(name, "", '{"type": "object"}') for name in tools)
    if kind:
        backend.fail_at("provision", BackendError(kind, "no", delivered=False, invalid=True))
    async with serving(backend) as client:
        states = await client.open(task_json=task_json(offered_tools=offered))
    assert states[-1].state == pb.EPISODE_STATE_FAILED
    assert states[-1].task_fault is is_at_fault


async def test_the_largest_ready_fits_into_a_message_and_is_complete() -> None:
    backend = ScriptedBackend()
    tools = [Tool(f"t{i:03}", "\N{ROCKET}" * 300, '{"type": "object"}') for i in range(400)]
    backend.tools = tuple(tools)
    shown = Media(b"\x89PNG" + bytes(65_000), "image/png", b"h" * 32, 65_004)
    backend.first_observation = (shown,) * 3
    async with serving(backend) as client:
        task = json.dumps({**json.loads(task_json()), "prompt": "\N{GRINNING FACE}" * 65_000})
        ready = (await client.open(task_json=task))[-1].ready
        assert [tool.name for tool in ready.tools] == [tool.name for tool in tools]
        assert len(ready.facts.prompt) == 65_000
        inlined = [bool(part.media.data) for part in ready.initial_observation]
        assert inlined == [True, True, False]


async def test_large_text_in_an_answer_is_fetched_like_any_bytes() -> None:
    backend = ScriptedBackend()
    text = "\N{ROCKET}" * 100_000

    async def hook(name: str, arguments: object) -> CallResult:
        return CallResult((Text(text), Text("short")))

    backend.hook = hook
    async with serving(backend) as client:
        episode_id = (await client.open())[0].episode_id
        large, short = (await client.call(episode_id, 0)).parts
        assert (large.media.mime, short.text) == ("text/plain; charset=utf-8", "short")
        request = pb.FetchMediaRequest(episode_id=episode_id, sha256=large.media.sha256)
        chunks = [r.chunk async for r in client.stub.FetchMedia(request)]
        assert b"".join(chunks).decode() == text


async def test_a_repeated_call_is_answered_from_store_and_executed_once() -> None:
    backend = ScriptedBackend()
    async with serving(backend) as client:
        episode_id = (await client.open())[0].episode_id
        first = await client.call(episode_id, 0)
        again = await client.call(episode_id, 0)

        assert (first.replayed, again.replayed) == (False, True)
        assert first.parts == again.parts
        (instance,) = backend.running.values()
        assert instance.executed["add"] == 1


async def test_a_call_out_of_order_is_refused() -> None:
    async with serving(ScriptedBackend()) as client:
        episode_id = (await client.open())[0].episode_id
        async with refused(grpc.StatusCode.FAILED_PRECONDITION, "CALL_SEQ"):
            await client.call(episode_id, 1)


async def test_a_task_that_is_none_is_refused_with_the_field_in_the_message() -> None:
    async with serving(ScriptedBackend()) as client:
        async with refused(grpc.StatusCode.INVALID_ARGUMENT, "BAD_TASK") as errors:
            await client.open(task_json='{"key": "t", "prompt": "p"}')
        assert "env_id (or env_key) is missing" in errors[0].message


async def test_an_environment_that_no_backend_serves_is_refused() -> None:
    unknown = refused(grpc.StatusCode.INVALID_ARGUMENT, "UNKNOWN_ENVIRONMENT")
    async with serving(ScriptedBackend()) as client, unknown:
        await client.open(task_json=task_json(env_id="elsewhere"))


async def test_opening_more_than_the_limit_is_refused_for_good() -> None:
    async with serving(ScriptedBackend(), limits={"max_episodes": 2}) as client:
        async with refused(grpc.StatusCode.FAILED_PRECONDITION, "OVER_LIMIT") as errors:
            await client.open(opening=3)
        assert "env_gateway.limits.max_episodes" in errors[0].message


async def test_a_full_queue_names_the_next_time() -> None:
    limits = {"max_episodes": 1, "max_waiting": 1}
    async with serving(ScriptedBackend(), limits=limits) as client:
        await client.open(0)
        waiting = asyncio.create_task(client.open(1))
        await until(lambda: client.gateway.admission.waiting == 1)
        async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL") as errors:
            await client.open(2)
        waiting.cancel()
        await asyncio.wait({waiting})
        assert errors[0].retry_delay_s == 1.0


async def test_an_unknown_episode_is_lost() -> None:
    async with serving(ScriptedBackend()) as client:
        async with refused(grpc.StatusCode.NOT_FOUND, "EPISODE_LOST"):
            await client.call("nowhere", 0)
        async with refused(grpc.StatusCode.NOT_FOUND, "EPISODE_LOST"):
            await client.grade("nowhere")
        lost = await client.stub.RenewEpisodes(
            pb.RenewEpisodesRequest(worker_id="rollout-0", episode_ids=["nowhere"])
        )
        assert list(lost.lost_episode_ids) == ["nowhere"]


async def test_cancelling_an_open_gives_the_environment_back() -> None:
    backend = ScriptedBackend()
    backend.delays["list_tools"] = 5.0
    async with serving(backend) as client:
        # Cancelling the task that reads is not enough: gRPC may not have started the call yet.
        opening = client.opening()
        await until(lambda: bool(backend.running))
        opening.cancel()
        backend.delays.clear()
        await until(lambda: not len(client.gateway.book))
    assert backend.running == {}


async def test_a_large_part_is_fetched_by_its_hash() -> None:
    image = Media(b"\x89PNG" + bytes(3 * 2**20), "image/png", b"h" * 32, 3 * 2**20 + 4, 640, 480)
    backend = ScriptedBackend()

    async def hook(name: str, arguments: object) -> CallResult:
        return CallResult((Text("shot"), image))

    backend.hook = hook
    async with serving(backend) as client:
        episode_id = (await client.open())[0].episode_id
        answer = await client.call(episode_id, 0)
        media = answer.parts[1].media
        assert (media.data, media.size_bytes, media.width) == (b"", image.size, 640)

        request = pb.FetchMediaRequest(episode_id=episode_id, sha256=media.sha256)
        chunks = [r.chunk async for r in client.stub.FetchMedia(request)]
        assert b"".join(chunks) == image.data
        assert max(map(len, chunks)) <= 2**20

        async with refused(grpc.StatusCode.NOT_FOUND, "MEDIA_LOST"):
            unknown = pb.FetchMediaRequest(episode_id=episode_id, sha256=b"?")
            async for _ in client.stub.FetchMedia(unknown):
                pytest.fail("there are no such bytes")


async def test_named_rewards_come_with_the_grade_those_that_are_unknown_left_out() -> None:
    grader = FakeGrader()
    grader.executions.append(Execution(result=0, rewards={"style": 0.5, "judge": None}))
    async with serving(ScriptedBackend(), grader) as client:
        episode_id = (await client.open())[0].episode_id
        grade = await client.grade(episode_id)
    assert (grade.reward, dict(grade.named_rewards)) == (0.0, {"style": 0.5})


async def test_a_verifier_that_could_not_run_is_no_grade_and_a_later_grade_stands() -> None:
    grader = FakeGrader()
    grader.executions.append(Execution(error="KeyError: 'x'", stdout="half way"))
    async with serving(ScriptedBackend(), grader) as client:
        episode_id = (await client.open())[0].episode_id
        failed = await client.grade(episode_id)
        assert failed.no_grade.reason == pb.NO_GRADE_REASON_EXECUTION_FAILED
        assert failed.stdout == "half way"
        assert (await client.grade(episode_id)).reward == 1.0
        grader.executions.append(Execution(result=0))
        assert (await client.grade(episode_id)).reward == 1.0


async def test_a_grade_again_is_that_of_the_new_answer_and_counts_from_then_on() -> None:
    grader = FakeGrader()
    async with serving(ScriptedBackend(), grader) as client:
        ready = (await client.open())[-1]
        assert ready.ready.regrades
        assert (await client.grade(ready.episode_id)).reward == 1.0
        grader.executions.append(Execution(result=0))
        header = pb.GradeHeader(episode_id=ready.episode_id, final_answer="other", again=True)
        again = await client.stub.Grade(iter([pb.GradeRequest(header=header)]))
        assert again.reward == 0.0
        assert grader.seen[-1].arguments == {"final_answer": "other"}
        assert (await client.grade(ready.episode_id)).reward == 0.0
    assert len(grader.seen) == 2


async def test_a_grade_that_ends_its_episode_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Instance, "regrades", False)
    async with serving(ScriptedBackend()) as client:
        ready = (await client.open())[-1]
        assert not ready.ready.regrades
        header = pb.GradeHeader(episode_id=ready.episode_id, again=True)
        async with refused(grpc.StatusCode.FAILED_PRECONDITION, "NO_REGRADE"):
            await client.stub.Grade(iter([pb.GradeRequest(header=header)]))


@pytest.mark.parametrize(
    ("execution", "fault"),
    [
        (Execution(error="KeyError: 'x'", raised=True), True),
        (Execution(result="passed"), True),
        (Execution(error="the server refused"), False),
        (Execution(error="late", timed_out=True), False),
    ],
)
async def test_a_missing_grade_says_whether_the_verifier_is_at_fault(
    execution: Execution, *, fault: bool
) -> None:
    grader = FakeGrader()
    grader.executions.append(execution)
    async with serving(ScriptedBackend(), grader) as client:
        episode_id = (await client.open())[0].episode_id
        assert (await client.grade(episode_id)).no_grade.verifier_fault is fault


async def test_a_grade_without_its_header_first_is_refused() -> None:
    async def requests() -> AsyncIterator[pb.GradeRequest]:
        yield pb.GradeRequest(transcript_chunk=b"{}")

    malformed = refused(grpc.StatusCode.INVALID_ARGUMENT, "BAD_REQUEST")
    async with serving(ScriptedBackend()) as client, malformed:
        await client.stub.Grade(requests())


READING = task_json(verifier_func="def verify(env, conversation=None):\n    return 1\n")


async def test_a_verifier_that_reads_the_transcript_gets_it_and_no_other() -> None:
    grader = FakeGrader()
    async with serving(ScriptedBackend(), grader) as client:
        for attempt, (task, limit) in enumerate([(READING, 16 * 2**20), (task_json(), 0)]):
            ready = (await client.open(attempt, task_json=task))[-1]
            assert ready.ready.transcript_bytes == limit
            assert (await client.grade(ready.episode_id, b'{"a": 1}\n{"b"', b": 2}\n")).reward == 1
    assert [seen.arguments for seen in grader.seen] == [
        {"conversation": '[{"a": 1}, {"b": 2}]'},
        {"final_answer": None},
    ]


async def test_a_transcript_of_another_length_than_its_header_says_is_refused() -> None:
    header = pb.GradeHeader(transcript_bytes=3)
    async with serving(ScriptedBackend()) as client:
        header.episode_id = (await client.open(task_json=READING))[-1].episode_id
        for chunk in (b"{}", b'{"":1}'):
            requests = [pb.GradeRequest(header=header), pb.GradeRequest(transcript_chunk=chunk)]
            async with refused(grpc.StatusCode.INVALID_ARGUMENT, "BAD_REQUEST"):
                await client.stub.Grade(iter(requests))


async def test_a_transcript_that_no_verifier_reads_is_ignored_at_any_length() -> None:
    async with serving(ScriptedBackend(), limits={"transcript_bytes": 1024}) as client:
        opened = [
            await client.open(at, task_json=task) for at, task in enumerate([READING, task_json()])
        ]
        reading, other = (states[-1].episode_id for states in opened)
        assert (await client.grade(other, *[b"x" * 1000] * 100)).reward == 1.0
        async with refused(grpc.StatusCode.INVALID_ARGUMENT, "BAD_REQUEST"):
            await client.grade(reading, b"x" * 1000, b"x" * 1000)
        assert client.service.reading_bytes == 0


async def test_capacity_is_sent_at_once_and_after_each_change() -> None:
    async with serving(ScriptedBackend(), limits={"max_episodes": 3}) as client:
        watch = client.stub.WatchCapacity(pb.WatchCapacityRequest())
        first = await watch.read()
        await client.open()
        second = await watch.read()
        watch.cancel()
        assert (first.open_episodes, first.limit) == (0, 3)
        assert second.open_episodes == 1


async def test_status_counts_by_environment() -> None:
    async with serving(ScriptedBackend()) as client:
        episode_id = (await client.open())[0].episode_id
        await client.call(episode_id, 0)
        await client.grade(episode_id)
        status = await client.stub.GetStatus(pb.GetStatusRequest())
        (environment,) = status.environments
        assert status.phase == "serving"
        assert (environment.calls, environment.grades) == (1, 1)
        assert dict(environment.episodes) == {"ready": 1}
        assert status.instances_created == 1


async def test_a_draining_gateway_opens_nothing_and_stops_its_process() -> None:
    async with serving(ScriptedBackend()) as client:
        await client.open(0)
        drain = await client.stub.Drain(pb.DrainRequest())
        assert drain.open_episodes == 1
        assert client.drained.is_set()
        async with refused(grpc.StatusCode.UNAVAILABLE, "DRAINING"):
            await client.open(1)


async def test_nothing_is_read_of_a_transcript_for_no_episode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    never = asyncio.Event()

    async def requests(episode_id: str) -> AsyncIterator[pb.GradeRequest]:
        yield pb.GradeRequest(header=pb.GradeHeader(episode_id=episode_id))
        yield pb.GradeRequest(transcript_chunk=b"x" * 1000)
        await never.wait()

    monkeypatch.setattr("flotilla_env_gateway.api.episode_service._STALL_S", 0.1)
    async with serving(ScriptedBackend()) as client:
        async with refused(grpc.StatusCode.NOT_FOUND, "EPISODE_LOST"):
            await client.stub.Grade(requests("no-such-episode"), timeout=3)
        ready = (await client.open())[-1]
        async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "STREAM_STALLED") as errors:
            await client.stub.Grade(requests(ready.episode_id), timeout=3)
        assert errors[0].retry_delay_s is not None
        # It is graded as if nothing had been sent before.
        assert (await client.grade(ready.episode_id)).HasField("reward")


async def test_only_so_many_watch_the_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla_env_gateway.api.episode_service._MOST_WATCHES", 1)
    async with serving(ScriptedBackend()) as client:
        watch = client.stub.WatchCapacity(pb.WatchCapacityRequest(), timeout=5)
        await watch.read()
        async with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_STREAMS"):
            await client.stub.WatchCapacity(pb.WatchCapacityRequest(), timeout=5).read()
        watch.cancel()
