"""Raw bytes to a gateway on a real socket, and an episode that stays open there."""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from flotilla.env_gateway.v1 import episode_service_pb2 as pb
from flotilla_common.rpc import rpc
from flotilla_common.rpc.errors import ServiceError
from tests.support.fake_gateway import task_json
from tests.support.threaded_gateway import TOKEN, ServedGateway, served
from tests.support.waiting import wait_until

SERVICE = "flotilla.env_gateway.v1.EpisodeService"
METHODS = pb.DESCRIPTOR.services_by_name["EpisodeService"].methods_by_name
AUTHORIZED = (("authorization", f"Bearer {TOKEN}"),)


class Refused(Exception):
    """A status, and the gateway's own error in it if there is one."""

    def __init__(self, error: Any) -> None:
        super().__init__(error)
        self.code: grpc.StatusCode = error.code()
        self.error: ServiceError | None = rpc.service_error(error)

    @property
    def reason(self) -> str:
        return self.error.reason if self.error else ""


@dataclass(slots=True)
class Wire:
    """Raw bytes to a gateway, and an episode that is open at it."""

    served: ServedGateway
    channel: grpc.Channel
    episode_id: str = ""
    calls: int = 0

    def send(
        self,
        name: str,
        *messages: bytes,
        metadata: Any = AUTHORIZED,
        timeout: float = 20.0,
        service: str = SERVICE,
    ) -> list[bytes]:
        """The answers to messages sent as they are. Raises Refused."""
        method = METHODS.get(name)
        into = bool(method and method.client_streaming)
        out = bool(method and method.server_streaming)
        kind = f"{'stream' if into else 'unary'}_{'stream' if out else 'unary'}"
        call = getattr(self.channel, kind)(f"/{service}/{name}")
        request = iter(messages) if into else messages[0]
        try:
            answer = call(request, metadata=metadata, timeout=timeout)
            if name == "WatchCapacity":
                first = [next(answer)]
                answer.cancel()
                return first
            return list(answer) if out else [answer]
        except grpc.RpcError as error:
            raise Refused(error) from error

    def open(self, request_id: str, **changes: Any) -> list[pb.OpenEpisodeResponse]:
        fields: dict[str, Any] = {
            "request_id": request_id,
            "run_id": "run",
            "group_id": request_id,
            "opening": 1,
            "task_json": task_json(),
            "worker_id": "rollout-0",
        }
        request = pb.OpenEpisodeRequest(**(fields | changes))
        answers = self.send("OpenEpisode", request.SerializeToString())
        return [pb.OpenEpisodeResponse.FromString(answer) for answer in answers]

    def call(self, name: str, arguments: str = "{}", **changes: Any) -> pb.CallToolResponse:
        """A call of the open episode."""
        fields: dict[str, Any] = {
            "episode_id": self.episode_id,
            "call_seq": self.calls,
            "name": name,
            "arguments_json": arguments,
        }
        request = pb.CallToolRequest(**(fields | changes))
        (answer,) = self.send("CallTool", request.SerializeToString())
        self.calls += 1
        return pb.CallToolResponse.FromString(answer)

    def grade(self, *requests: pb.GradeRequest) -> pb.GradeResponse:
        (answer,) = self.send("Grade", *(request.SerializeToString() for request in requests))
        return pb.GradeResponse.FromString(answer)

    def close(self, episode_id: str) -> None:
        self.send("CloseEpisode", pb.CloseEpisodeRequest(episode_id=episode_id).SerializeToString())

    def is_well(self) -> bool:
        """The one episode is open, and answers as before."""
        answer = self.call("look")
        return answer.outcome == pb.TOOL_OUTCOME_OK and answer.parts[0].text == "0"


@contextmanager
def opened_wire() -> Generator[Wire]:
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with (
        served(limits={"transcript_bytes": 2**20}) as gateway,
        grpc.insecure_channel(gateway.address, options=options) as channel,
    ):
        wire = Wire(gateway, channel)
        wire.episode_id = wire.open("witness")[-1].episode_id
        yield wire


def check_unharmed(wire: Wire) -> None:
    """The one episode is open, as it was, and no other is left."""
    gateway, backend = wire.served.gateway, wire.served.backend
    backend.hook = None
    wait_until(lambda: len(backend.running) == gateway.admission.held_places == 1)
    assert wire.is_well()
