"""A holder of a run's token makes no service grow without end: each call that streams or is
held in memory has its bound."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.wrappers_pb2 import StringValue

from flotilla.env_gateway.v1 import episode_service_pb2 as episodes_pb
from flotilla.learner.v1 import group_service_pb2 as groups_pb
from flotilla_common.process import open_file_limit
from flotilla_common.rpc import rpc, rpc_handlers, rpc_options
from flotilla_launcher.agent_protocol import UnitPhase, UnitReport
from flotilla_launcher.control.agent_reports import AgentReports
from flotilla_launcher.store.roster import Member, Roster, TooManyMembersError
from tests.contract.test_episode_service import refused, serving
from tests.contract.test_group_service import attached, refusal_of
from tests.contract.test_policy_service import attach_request
from tests.support import echo_service
from tests.support.fake_environments import ScriptedBackend
from tests.support.fake_gateway import task_json
from tests.support.half_sent_calls import half_sent
from tests.support.learner import TOKENIZER, FakeWorker
from tests.support.waiting import until

FULL = grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_of_each_method_that_streams_only_so_many_calls_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rpc_handlers, "MOST_STREAMS", 1)
    server = rpc.server(token=echo_service.TOKEN)
    echo_service.add(server)
    async with (
        rpc.serving(server, "127.0.0.1:0") as at,
        rpc.channel(at.address, token=echo_service.TOKEN) as channel,
    ):
        repeat = echo_service.method(channel, "Repeat", "stream_stream")
        first = repeat()
        await first.write(StringValue(value="1"))
        assert (await first.read()).value == "1"
        assert await refusal_of(repeat(iter(())).read()) == "TOO_MANY_STREAMS"
        # Others have a bound of their own, and the end of one makes room for the next.
        assert await echo_service.call(channel, "served") == "served"
        first.cancel()
        await _until_served(repeat)


async def _until_served(repeat: Any) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                call = repeat(iter([StringValue(value="2")]))
                assert (await call.read()).value == "2"
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.01)
            else:
                return


async def test_connections_leave_a_service_files_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_file_limit, "_FILES", 12)
    async with rpc.serving(rpc.server(token=echo_service.TOKEN), "127.0.0.1:0") as at:
        host, _, port = at.address.rpartition(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        try:
            # The server greets the callers that it accepts.
            for reader, _ in held:
                assert await asyncio.wait_for(reader.read(1), 5)
            reader, writer = await asyncio.open_connection(host, int(port))
            held.append((reader, writer))
            with suppress(ConnectionResetError):
                assert not await asyncio.wait_for(reader.read(1), 5)
        finally:
            for _, writer in held:
                writer.close()


async def test_transcripts_on_their_way_take_so_much_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flotilla_env_gateway.api.episode_service._MOST_READ_BYTES", 1200)
    more = asyncio.Event()
    reading = task_json(verifier_func="def verify(env, conversation=None):\n    return 1\n")

    async def slow(episode_id: str) -> AsyncIterator[episodes_pb.GradeRequest]:
        header = episodes_pb.GradeHeader(episode_id=episode_id, transcript_bytes=1000)
        yield episodes_pb.GradeRequest(header=header)
        yield episodes_pb.GradeRequest(transcript_chunk=b"x" * 1000)
        await more.wait()

    async with serving(ScriptedBackend(), limits={"transcript_bytes": 1024}) as client:
        first, second = [(await client.open(at, task_json=reading))[-1] for at in range(2)]
        graded = asyncio.create_task(_graded(client.stub.Grade(slow(first.episode_id))))
        await until(lambda: client.service.reading_bytes)
        async with refused(FULL, "QUEUE_FULL") as errors:
            await client.grade(second.episode_id, b"x" * 500)
        assert errors[0].retry_delay_s is not None
        more.set()
        assert (await graded).HasField("reward")
        # Read and refused requests hold no room any more.
        assert not client.service.reading_bytes
        assert (await client.grade(second.episode_id, b"x" * 1000)).HasField("reward")


async def _graded(call: Any) -> episodes_pb.GradeResponse:
    return await call


def lease_request(worker: FakeWorker, **changes: Any) -> groups_pb.LeaseGroupRequest:
    request = groups_pb.LeaseGroupRequest(
        request_id="r",
        worker_id=worker.worker_id,
        incarnation=worker.incarnation,
        free_attempts=1,
        tokenizer_digest=TOKENIZER,
    )
    for name, value in changes.items():
        getattr(request, name).extend(value) if isinstance(value, list) else setattr(
            request, name, value
        )
    return request


LONG = "x" * 257
REASONS_OF_NAMES = {
    "request_id": "ID_TOO_LONG",
    "worker_id": "ID_TOO_LONG",
    "incarnation": "MALFORMED_REQUEST",
}


async def test_what_a_worker_calls_itself_is_short(tmp_path: Path) -> None:
    async with attached(tmp_path) as worker:
        for name, reason in REASONS_OF_NAMES.items():
            call = worker.groups.LeaseGroup(lease_request(worker, **{name: LONG}))
            assert await refusal_of(call) == reason, name
        for many in ([LONG], [str(number) for number in range(65)]):
            call = worker.groups.LeaseGroup(lease_request(worker, capabilities=many))
            assert await refusal_of(call) == "MALFORMED_REQUEST"
        for name in ("worker_id", "incarnation"):
            stream: Any = worker.policies.Attach(attach_request(worker, **{name: LONG}))
            assert await refusal_of(stream.read()) == REASONS_OF_NAMES[name], name


async def test_a_learner_knows_so_many_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flotilla_learner.groups.workers._MOST_WORKERS", 1)
    async with attached(tmp_path) as worker:
        call = worker.groups.LeaseGroup(lease_request(worker, worker_id="another"))
        assert await refusal_of(call) == "TOO_MANY_WORKERS"
        stream: Any = worker.policies.Attach(attach_request(worker, worker_id="another"))
        assert await refusal_of(stream.read()) == "TOO_MANY_WORKERS"
        # Known callers are served as before.
        assert await worker.poll()


def test_a_launcher_knows_so_many_replicas_and_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla_launcher.store.roster.MOST_MEMBERS", 1)
    monkeypatch.setattr("flotilla_launcher.control.agent_reports.MOST_MEMBERS", 1)
    roster, units = Roster(), AgentReports()
    for incarnation in ("a", "b"):
        roster.register_member(Member("rollout", 0, incarnation, "x:1"))
        units.record_report(
            ("rollout", 0), incarnation, UnitReport(UnitPhase.RUNNING, None, "h", 0)
        )
    with pytest.raises(TooManyMembersError):
        roster.register_member(Member("rollout", 1, "c", "x:1"))
    with pytest.raises(TooManyMembersError):
        units.record_report(("rollout", 1), "c", UnitReport(UnitPhase.RUNNING, None, "h", 0))


async def test_a_message_that_is_too_long_is_not_taken_in_for_its_length() -> None:
    """The bound of one message holds before it is there."""
    server = rpc.server(token=echo_service.TOKEN)
    echo_service.add(server)
    async with rpc.serving(server, "127.0.0.1:0") as at, half_sent(at.address) as connection:
        call = connection.call(
            f"/{echo_service.SERVICE}/Echo", echo_service.TOKEN, claimed_bytes=2**30
        )
        await asyncio.wait_for(connection.answered[call].wait(), 60)
        assert connection.sent[call] < 2 * rpc_options.MAX_MESSAGE_BYTES
