"""The learner's edge: `flotilla.learner.v1.RankService`. The proto holds the contract."""

import asyncio
from collections.abc import AsyncIterator

import grpc

from flotilla.learner.v1 import rank_service_pb2 as pb
from flotilla.learner.v1 import rank_service_pb2_grpc
from services.common.errors import ServiceError
from services.common.log import get_logger
from services.learner.api.request_checks import Context, refuse
from services.learner.ranks import codec
from services.learner.ranks.machine_admission import WrongMachineError
from services.learner.ranks.machines import Over, Roll, Session

_log = get_logger(__name__)


class RankService(rank_service_pb2_grpc.RankServiceServicer):
    """Translates between the contract and the roll. `drain` is set when a machine has to go."""

    def __init__(self, roll: Roll, *, drain: asyncio.Event) -> None:
        self._roll = roll
        self._drain = drain

    async def Join(
        self, request_iterator: AsyncIterator[pb.JoinRequest], context: Context
    ) -> AsyncIterator[pb.JoinResponse]:
        session = await self._admitted(request_iterator)
        reading = asyncio.create_task(self._read(request_iterator, session))
        try:
            yield pb.JoinResponse(welcome=pb.Welcome())
            while (said := await session.next()) is not None:
                if isinstance(said, Over):
                    yield pb.JoinResponse(over=pb.Over())
                    return
                yield codec.call_message(said)
        finally:
            self._roll.left(session, "is gone: its stream has ended")
            reading.cancel()
        raise refuse(grpc.StatusCode.UNAVAILABLE, "LEARNER_ENDED", "join the next learner")

    async def _admitted(self, requests: AsyncIterator[pb.JoinRequest]) -> Session:
        try:
            return self._roll.admit(codec.machine(await anext(requests, pb.JoinRequest())))
        except codec.MalformedError as error:
            raise _malformed(str(error)) from error
        except WrongMachineError as error:
            _log.error("a machine was refused", why=str(error))
            code = grpc.StatusCode.FAILED_PRECONDITION
            raise refuse(code, "WRONG_MACHINE", str(error)) from error

    async def _read(self, requests: AsyncIterator[pb.JoinRequest], session: Session) -> None:
        """Hear the machine out; with what is malformed, or the end, it is lost."""
        try:
            async for message in requests:
                self._hear(message, session)
        except (codec.MalformedError, KeyError) as error:
            session.lost(f"answers what was not asked: {error!r}")
        except grpc.RpcError as error:
            session.lost(f"is gone: {error!r}")
        else:
            session.lost("is gone: its stream has ended")

    def _hear(self, message: pb.JoinRequest, session: Session) -> None:
        said = message.WhichOneof("said")
        if said == "leaving":
            _log.warning("a machine has to go: draining", machine=session.machine.number)
            self._drain.set()
        elif said == "answer":
            answer = message.answer
            if answer.error:
                session.fail(answer.call, answer.error, rank_ended=answer.ended)
            else:
                session.succeed(answer.call, codec.result(answer))


def _malformed(message: str) -> ServiceError:
    return refuse(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST", message)
