"""A registry that answers as a test wants, over a real socket."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from flotilla.launcher.v1 import registry_service_pb2 as pb
from flotilla.launcher.v1 import registry_service_pb2_grpc as pb_grpc
from flotilla_common.rpc.errors import ServiceError
from flotilla_common.rpc.rpc import to_duration


class FakeRegistry(pb_grpc.RegistryServiceServicer):
    """`peers` maps replica to address; `command` answers heartbeats; `failure` is raised."""

    def __init__(self) -> None:
        self.registered: list[pb.RegisterRequest] = []
        self.heartbeats: list[pb.HeartbeatRequest] = []
        self.command = pb.COMMAND_NONE
        self.metrics: dict[str, float] = {}
        self.interval_s = 0.02
        self.failure: ServiceError | None = None
        self.peers: dict[int, str] = {}
        self.changed = asyncio.Event()

    async def Register(self, request: pb.RegisterRequest, context: Any) -> pb.RegisterResponse:
        self.registered.append(request)
        return pb.RegisterResponse(
            heartbeat_interval=to_duration(self.interval_s), orphan_after=to_duration(0.4)
        )

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        if self.failure is not None:
            raise self.failure
        self.heartbeats.append(request)
        return pb.HeartbeatResponse(command=self.command, metrics=self.metrics)

    async def ResolvePeers(
        self, request: pb.ResolvePeersRequest, context: Any
    ) -> AsyncIterator[pb.ResolvePeersResponse]:
        while True:
            changed = self.changed
            peers = [pb.Peer(replica=r, address=a) for r, a in self.peers.items()]
            yield pb.ResolvePeersResponse(peers=peers)
            await changed.wait()

    async def ReportUnit(
        self, request: pb.ReportUnitRequest, context: Any
    ) -> pb.ReportUnitResponse:
        raise NotImplementedError

    async def PushLogs(self, request: pb.PushLogsRequest, context: Any) -> pb.PushLogsResponse:
        raise NotImplementedError

    def move(self, peers: dict[int, str]) -> None:
        self.peers = peers
        self.changed.set()
        self.changed = asyncio.Event()


def refusal(reason: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.FAILED_PRECONDITION, reason, "go away", domain="launcher.flotilla"
    )
