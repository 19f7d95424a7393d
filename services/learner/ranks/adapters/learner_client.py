"""gRPC client of RankService: the learner as its further machines reach it.

Implements `ranks.ports.LearnerClient`."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from flotilla.learner.v1 import rank_service_pb2 as pb
from flotilla.learner.v1 import rank_service_pb2_grpc
from services.common.channel import MAX_TIMEOUT_S
from services.common.rpc import service_error
from services.learner.ranks import codec
from services.learner.ranks.machine_admission import Machine, WrongMachineError
from services.learner.ranks.machines import RankCall
from services.learner.ranks.ports import LearnerAwayError

# Opens a channel to the learner; waits until it is known where that is.
Dial = Callable[[], Awaitable[grpc.aio.Channel]]


class RankStream:
    """One Join stream. Implements `ranks.ports.Membership`."""

    def __init__(
        self, says: asyncio.Queue[pb.JoinRequest], responses: AsyncIterator[pb.JoinResponse]
    ) -> None:
        self._says = says
        self._responses = responses
        self.over = False

    async def receive_calls(self) -> AsyncGenerator[RankCall]:
        """See `Membership`."""
        async for message in self._responses:
            said = message.WhichOneof("said")
            if said == "over":
                self.over = True
                return
            if said == "call":
                yield codec.decode_call(message.call)

    def send_result(self, call: int, result: Mapping[str, Any]) -> None:
        """See `Membership`."""
        self._says.put_nowait(codec.encode_result(call, result))

    def send_error(self, call: int, error: str, *, ended: bool) -> None:
        """See `Membership`."""
        self._says.put_nowait(codec.encode_error(call, error, ended=ended))

    def announce_leaving(self) -> None:
        """See `Membership`."""
        self._says.put_nowait(pb.JoinRequest(leaving=pb.Leaving()))


class GrpcLearnerClient:
    """A gRPC client that joins the learner as `machine`."""

    def __init__(self, dial: Dial, machine: Machine) -> None:
        self._dial = dial
        self._machine = machine

    @asynccontextmanager
    async def join_learner(self) -> AsyncGenerator[RankStream]:
        """See `LearnerClient`."""
        stub: Any = rank_service_pb2_grpc.RankServiceStub(await self._dial())
        says: asyncio.Queue[pb.JoinRequest] = asyncio.Queue()
        says.put_nowait(codec.encode_machine(self._machine))
        # As long as the run may take: it ends with the learner, or with the connection to it.
        call = stub.Join(_drain_queue(says), timeout=MAX_TIMEOUT_S)
        responses = aiter(call)
        try:
            await anext(responses, None)
            yield RankStream(says, responses)
        except grpc.aio.AioRpcError as error:
            raise _translate_error(error) from error
        finally:
            call.cancel()


async def _drain_queue(says: asyncio.Queue[pb.JoinRequest]) -> AsyncGenerator[pb.JoinRequest]:
    while True:
        yield await says.get()


def _translate_error(error: grpc.aio.AioRpcError) -> Exception:
    reason = service_error(error)
    if reason is not None and reason.reason == "WRONG_MACHINE":
        return WrongMachineError(reason.message)
    return LearnerAwayError(f"{error.code().name}: {error.details()}")
