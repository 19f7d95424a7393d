"""Attackers of `benchmarks.hostile_load`, in a process of their own.

`python -m benchmarks.hostile_load.attacks SERVICE ADDRESS SCALE` begins all its attacks at once,
prints `holding` with the held numbers as JSON lines, and holds them until its standard input ends
or its time is over. It connects only to 127.0.0.1.
"""

import argparse
import asyncio
import json
import resource
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flotilla.env_gateway.v1 import episode_service_pb2 as episodes_pb
from flotilla.env_gateway.v1.episode_service_pb2_grpc import EpisodeServiceStub
from flotilla.learner.v1 import group_service_pb2 as groups_pb
from flotilla.learner.v1 import policy_service_pb2 as policies_pb
from flotilla.learner.v1 import trajectory_pb2
from flotilla.learner.v1.group_service_pb2_grpc import GroupServiceStub
from flotilla.learner.v1.policy_service_pb2_grpc import PolicyServiceStub
from flotilla_common.process.host_identity import host_digest
from flotilla_common.rpc import rpc
from tests.support.half_sent_calls import half_sent
from tests.support.learner import TOKEN, TOKENIZER, FakeWorker

CONNECTIONS, HALF_OPEN, WATCHES, SUBMISSIONS = 2500, 1000, 2500, 200
# Calls without a token whose message is incomplete.
HALF_SENT = 400
PER_CHANNEL = 100
HOLD_S = 120.0
CHUNK_BYTES = 2**20 - 2**10
# Start of an HTTP/2 connection: the preface, and empty settings.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")

Held = list[Any]


def idle_connections(address: str, count: int) -> list[socket.socket]:
    """Idle connections after a handshake; as many as are accepted."""
    host, _, port = address.rpartition(":")
    held: list[socket.socket] = []
    for _ in range(count):
        try:
            connection = socket.create_connection((host, int(port)), timeout=2.0)
            connection.sendall(GREETING)
        except OSError:
            break
        held.append(connection)
    return held


async def stay_silent() -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield


class Strangers:
    """Attacking clients of one service."""

    def __init__(self, service: str, address: str, scale: float) -> None:
        self._service = service
        self._address = address
        self._scale = scale
        self._channels: list[grpc.aio.Channel] = []
        self._open = AsyncExitStack()
        self.held: Held = []

    def count(self, of: int) -> int:
        return max(1, int(of * self._scale))

    async def begin(self) -> dict[str, int]:
        connections = await asyncio.to_thread(
            idle_connections, self._address, self.count(CONNECTIONS)
        )
        self.held += connections
        # First, because the number of attached workers is limited.
        sent = await self._sent(self.count(SUBMISSIONS))
        half_open = [
            self._half_open(channel) for channel in self._open_channels(self.count(HALF_OPEN))
        ]
        channels = self._open_channels(self.count(WATCHES))
        watches = [self._begin_watch(channel, number) for number, channel in enumerate(channels)]
        self.held += half_open + watches
        submissions = self._submissions(sent)
        calls = {"half_open": half_open, "watches": watches, "submissions": submissions}
        half_sent = await self._half_sent(self.count(HALF_SENT))
        before: dict[str, int] = {}
        # Wait for refusals.
        for _ in range(20):
            await asyncio.sleep(1.0)
            held = {name: sum(not call.done() for call in made) for name, made in calls.items()}
            held["half_sent"] = sum(not answered.is_set() for answered in half_sent)
            if held == before:
                break
            before = held
        return {"connections": len(connections), **before}

    async def end(self) -> None:
        await self._open.aclose()
        for channel in self._channels:
            await channel.close()
        for held in self.held:
            if isinstance(held, socket.socket):
                held.close()

    def _open_channels(self, calls: int) -> list[grpc.aio.Channel]:
        """Open channels for the calls; some calls share one."""
        channels = [
            rpc.channel(self._address, token=TOKEN, stream_timeout_s=HOLD_S, timeout_s=HOLD_S)
            for _ in range(-(-calls // PER_CHANNEL))
        ]
        self._channels += channels
        return [channels[n // PER_CHANNEL] for n in range(calls)]

    async def _half_sent(self, count: int) -> list[asyncio.Event]:
        """Return events that are set when a call is answered."""
        name = {
            "learner": "learner.v1.GroupService",
            "env_gateway": "env_gateway.v1.EpisodeService",
        }
        answered: list[asyncio.Event] = []
        for _ in range(-(-count // PER_CHANNEL)):
            connection = await self._open.enter_async_context(half_sent(self._address))
            calls = min(PER_CHANNEL, count - len(answered))
            numbers = [connection.call(f"/flotilla.{name}Service/GetStatus") for _ in range(calls)]
            answered += [connection.answered[number] for number in numbers]
        return answered

    def _half_open(self, channel: grpc.aio.Channel) -> Any:
        return self._begin_submission(channel)(stay_silent())

    def _begin_submission(self, channel: grpc.aio.Channel) -> Any:
        stub: Any
        if self._service == "learner":
            stub = GroupServiceStub(channel)
            return stub.SubmitTrajectory
        stub = EpisodeServiceStub(channel)
        return stub.Grade

    def _begin_watch(self, channel: grpc.aio.Channel, number: int) -> Any:
        """Open an unread watch; half of the watches need no token."""
        health: Any = health_pb2_grpc.HealthStub(channel)
        if number % 2:
            return health.Watch(health_pb2.HealthCheckRequest())
        if self._service == "env_gateway":
            return EpisodeServiceStub(channel).WatchCapacity(episodes_pb.WatchCapacityRequest())
        request = policies_pb.AttachRequest(
            worker_id=f"hostile-{number}",
            incarnation="0",
            device_count=1,
            transports=[policies_pb.TRANSPORT_SHM],
            host_digest=host_digest(),
            tokenizer_digest=TOKENIZER,
        )
        return PolicyServiceStub(channel).Attach(request)

    async def _sent(self, count: int) -> list[AsyncIterator[Any]]:
        if self._service == "learner":
            return [unfinished_trajectory(header) for header in await self._make_headers(count)]
        return [unfinished_grade() for _ in range(count)]

    def _submissions(self, sent: Sequence[AsyncIterator[Any]]) -> list[Any]:
        channels = self._open_channels(len(sent))
        calls = [
            self._begin_submission(channel)(parts)
            for channel, parts in zip(channels, sent, strict=True)
        ]
        self.held += calls
        return calls

    async def _make_headers(self, count: int) -> Sequence[trajectory_pb2.TrajectoryHeader]:
        """Begin an unfinished submission, every other one under a valid lease."""
        worker = FakeWorker(self._address, "hostile", channel=self._open_channels(1)[0])
        self.held.append(asyncio.create_task(worker.attach()))
        await asyncio.wait_for(worker.updated.wait(), 30)
        keys: list[tuple[str, str, int]] = []
        while len(keys) < count // 2 and (lease := await worker.poll()):
            keys += [(lease.lease_id, lease.group_id, a.attempt_index) for a in lease.attempts]
        keys += [("forged", "forged", 0)] * count
        return [header_of(*key) for pair in zip(keys, reversed(keys), strict=True) for key in pair][
            :count
        ]


def header_of(lease_id: str, group_id: str, attempt: int) -> trajectory_pb2.TrajectoryHeader:
    """Make the header of a trajectory of 4 MiB."""
    sequences = [trajectory_pb2.SequenceHeader(token_count=2**13) for _ in range(64)]
    return trajectory_pb2.TrajectoryHeader(
        key=trajectory_pb2.TrajectoryKey(group_id=group_id, attempt_index=attempt),
        lease_id=lease_id,
        worker_id="hostile",
        sequences=sequences,
    )


async def unfinished_trajectory(header: trajectory_pb2.TrajectoryHeader) -> AsyncIterator[Any]:
    yield groups_pb.SubmitTrajectoryRequest(header=header)
    for _ in range(3):
        chunk = trajectory_pb2.SequenceChunk(token_ids=bytes(CHUNK_BYTES))
        yield groups_pb.SubmitTrajectoryRequest(chunk=chunk)
    await asyncio.Event().wait()


async def unfinished_grade() -> AsyncIterator[Any]:
    yield episodes_pb.GradeRequest(header=episodes_pb.GradeHeader(episode_id="forged"))
    for _ in range(3):
        yield episodes_pb.GradeRequest(transcript_chunk=bytes(CHUNK_BYTES))
    await asyncio.Event().wait()


async def main(service: str, address: str, scale: float) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 16384)), hard))
    strangers = Strangers(service, address, scale)
    try:
        print(json.dumps({"holding": await strangers.begin()}), flush=True)
        async with asyncio.timeout(HOLD_S):
            await asyncio.to_thread(sys.stdin.read)
    except TimeoutError:
        pass
    finally:
        await strangers.end()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("service")
    parser.add_argument("address")
    parser.add_argument("scale", type=float)
    given = parser.parse_args()
    asyncio.run(main(given.service, given.address, given.scale))
