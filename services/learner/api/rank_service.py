"""Server of `flotilla.learner.v1.RankService`. The proto holds the contract."""

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
from services.learner.ranks.machines import LearnerEnded, MachineRoster, MachineSession

_log = get_logger(__name__)


class RankService(rank_service_pb2_grpc.RankServiceServicer):
    """Translation between contract and roster. `drain` is set when a machine has to go."""

    def __init__(self, roster: MachineRoster, *, drain: asyncio.Event) -> None:
        self._roster = roster
        self._drain = drain

    async def Join(
        self, request_iterator: AsyncIterator[pb.JoinRequest], context: Context
    ) -> AsyncIterator[pb.JoinResponse]:
        session = await self._admit_machine(request_iterator)
        reading = asyncio.create_task(self._read_answers(request_iterator, session))
        try:
            yield pb.JoinResponse(welcome=pb.Welcome())
            while (said := await session.next_message()) is not None:
                if isinstance(said, LearnerEnded):
                    yield pb.JoinResponse(over=pb.Over())
                    return
                yield codec.encode_call(said)
        finally:
            self._roster.remove_session(session, "is gone: its stream has ended")
            reading.cancel()
        raise refuse(grpc.StatusCode.UNAVAILABLE, "LEARNER_ENDED", "join the next learner")

    async def _admit_machine(self, requests: AsyncIterator[pb.JoinRequest]) -> MachineSession:
        try:
            return self._roster.admit_machine(
                codec.decode_machine(await anext(requests, pb.JoinRequest()))
            )
        except codec.MalformedRankMessageError as error:
            raise _malformed_request(str(error)) from error
        except WrongMachineError as error:
            _log.error("a machine was refused", why=str(error))
            code = grpc.StatusCode.FAILED_PRECONDITION
            raise refuse(code, "WRONG_MACHINE", str(error)) from error

    async def _read_answers(
        self, requests: AsyncIterator[pb.JoinRequest], session: MachineSession
    ) -> None:
        """Read a machine's messages; with one that is malformed, or the end, it is lost."""
        try:
            async for message in requests:
                self._handle_message(message, session)
        except (codec.MalformedRankMessageError, KeyError) as error:
            session.mark_lost(f"answers what was not asked: {error!r}")
        except grpc.RpcError as error:
            session.mark_lost(f"is gone: {error!r}")
        else:
            session.mark_lost("is gone: its stream has ended")

    def _handle_message(self, message: pb.JoinRequest, session: MachineSession) -> None:
        said = message.WhichOneof("said")
        if said == "leaving":
            _log.warning("a machine has to go: draining", machine=session.machine.number)
            self._drain.set()
        elif said == "answer":
            answer = message.answer
            if answer.error:
                session.fail_call(answer.call, answer.error, rank_ended=answer.ended)
            else:
                session.complete_call(answer.call, codec.decode_result(answer))


def _malformed_request(message: str) -> ServiceError:
    return refuse(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST", message)
