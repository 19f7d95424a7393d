"""Server of `flotilla.learner.v1.GroupService`. The proto holds the contract."""

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

import grpc

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla.learner.v1 import group_service_pb2_grpc
from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.rpc.errors import ServiceError
from flotilla_common.rpc.stalled_streams import RefusedStreamDrain, StalledError, read_paced
from flotilla_common.run_folder.journal_file import JournalError
from flotilla_common.run_folder.picture_tables import PictureMissingError
from flotilla_common.run_folder.trajectory_tables import ContentConflictError
from flotilla_common.weights.fingerprint import TokenizerDigests
from flotilla_common.wire.policy import decode_policy, encode_policy
from flotilla_learner.api import decode, encode
from flotilla_learner.api.request_checks import (
    FAILED,
    MOST_CAPABILITIES,
    RETRY_S,
    Context,
    bounded_workers,
    check_epoch,
    check_name_list,
    check_names,
    check_tokenizer,
    digests_of,
    refuse,
)
from flotilla_learner.api.sequence_decode import MalformedRequestError, TokenLimits
from flotilla_learner.config.learner import IntakeConfig
from flotilla_learner.groups.dispatcher import GroupDispatcher
from flotilla_learner.groups.intake_budget import IntakeBudget, IntakeFullError
from flotilla_learner.groups.lease_idempotency import DrainingError, LeaseRequest
from flotilla_learner.groups.open_groups import LeaseLostError
from flotilla_learner.groups.policy_provenance import UnknownPolicyError
from flotilla_learner.groups.trajectory_intake import Receipt
from flotilla_learner.run.status import LearnerStatus

# Memory of a header relative to its bytes on the wire, at most or nearly.
_PARSED_SIZE_FACTOR = 8
# Longest wait of a request for a lease.
_POLL_S = 20.0


@dataclass(kw_only=True)
class GroupService(group_service_pb2_grpc.GroupServiceServicer):
    """Adapter between the contract and the dispatcher."""

    dispatcher: GroupDispatcher
    status: LearnerStatus
    limits: asyncio.Future[TokenLimits]
    tokenizer: TokenizerDigests
    drain: asyncio.Event
    intake: IntakeConfig

    def __post_init__(self) -> None:
        self._room = IntakeBudget(
            worker_bytes=self.intake.worker_bytes, total_bytes=self.intake.total_bytes
        )
        self._last_words = RefusedStreamDrain()

    async def LeaseGroup(
        self, request: pb.LeaseGroupRequest, context: Context
    ) -> pb.LeaseGroupResponse:
        check_epoch(context, self.dispatcher.run_epoch)
        check_tokenizer(digests_of(request), self.tokenizer)
        check_names(
            request_id=request.request_id,
            worker_id=request.worker_id,
            incarnation=request.incarnation,
        )
        check_name_list("capabilities", request.capabilities, MOST_CAPABILITIES)
        poll = LeaseRequest(
            request_id=request.request_id,
            worker_id=request.worker_id,
            incarnation=request.incarnation,
            holding=decode_policy(request.holding) if request.HasField("holding") else None,
            free_attempts=request.free_attempts,
            capabilities=frozenset(request.capabilities),
        )
        with _translate_refusals(), bounded_workers():
            lease = await self.dispatcher.lease_group(poll, self._poll_s_left(context))
        response = pb.LeaseGroupResponse(run_epoch=self.dispatcher.run_epoch)
        if lease:
            rules = self.dispatcher.book.rules
            message = encode.lease_message(
                lease,
                self.dispatcher.attempt_seeds(lease),
                run_epoch=self.dispatcher.run_epoch,
                remaining_s=lease.deadline - loop_time(),
                ttl_s=rules.ttl_s,
                tries=rules.max_tries,
            )
            response.lease.CopyFrom(message)
        return response

    async def RenewLeases(
        self, request: pb.RenewLeasesRequest, context: Context
    ) -> pb.RenewLeasesResponse:
        check_epoch(context, self.dispatcher.run_epoch)
        lost = self.dispatcher.book.renew_leases(request.worker_id, request.lease_ids, loop_time())
        return pb.RenewLeasesResponse(lost_lease_ids=lost, run_epoch=self.dispatcher.run_epoch)

    async def ReleaseLeases(
        self, request: pb.ReleaseLeasesRequest, context: Context
    ) -> pb.ReleaseLeasesResponse:
        check_epoch(context, self.dispatcher.run_epoch)
        await self.dispatcher.release_leases(request.worker_id, request.lease_ids)
        return pb.ReleaseLeasesResponse()

    async def SubmitTrajectory(
        self, request_iterator: AsyncIterator[pb.SubmitTrajectoryRequest], context: Context
    ) -> pb.SubmitTrajectoryResponse:
        check_epoch(context, self.dispatcher.run_epoch)
        # Known once the ranks have loaded the model; the caller's deadline bounds the wait.
        limits = await asyncio.shield(self.limits)
        try:
            with _translate_refusals():
                async with aclosing(read_paced(request_iterator, self.intake.stall_s)) as parts:
                    receipt = await self._receive_trajectory(parts, limits)
        except ServiceError:
            await self._last_words.drain_stream(request_iterator)
            raise
        return pb.SubmitTrajectoryResponse(
            repeated_submission=receipt.repeated, group_complete=receipt.group_complete
        )

    async def _receive_trajectory(
        self, parts: AsyncIterator[pb.SubmitTrajectoryRequest], limits: TokenLimits
    ) -> Receipt:
        """Receive a trajectory. Reads nothing without a lease, and not before there is room for
        all of it."""
        first = await anext(parts, None)
        if first is None:
            raise MalformedRequestError("the stream broke off before its header")
        assembly = decode.TrajectoryAssembler(first, limits)
        attempt, header = assembly.claim, _PARSED_SIZE_FACTOR * first.ByteSize()
        await self.dispatcher.intake.admit_try(attempt)
        room = self._room.reserve_bytes(attempt.worker_id, assembly.announced_bytes, header=header)
        async with room:
            async for part in parts:
                if attempt.leased:
                    self.dispatcher.book.check_holder(attempt)
                assembly.add_chunk(part)
            attempt.trajectory = assembly.build_trajectory()
            return await self.dispatcher.intake.submit_try(attempt)

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        status, book = self.status, self.dispatcher.book
        response = pb.GetStatusResponse(
            phase=status.phase,
            step=status.step,
            total_steps=status.total_steps,
            leased_groups=book.leased_groups,
            free_slots=book.free_slots,
            ready_groups=len(self.dispatcher.batcher),
            metrics=status.shown_metrics,
            error=status.error,
        )
        if status.policy:
            response.policy.CopyFrom(encode_policy(status.policy))
        return response

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        await self.dispatcher.stop_leasing()
        self.drain.set()
        return pb.DrainResponse()

    def _poll_s_left(self, context: Context) -> float:
        """Return how long to wait, so that the reply precedes the caller's deadline and an empty
        poll is reported as such."""
        return max(0.0, min(_POLL_S, context.time_remaining() - 1.0))


@contextmanager
def _translate_refusals() -> Generator[None]:
    """Translate the dispatcher's refusals into those of the contract."""
    try:
        yield
    except (DrainingError, JournalError) as error:
        # If the journal is full or belongs to another learner, this learner ends too.
        raise refuse(grpc.StatusCode.UNAVAILABLE, "DRAINING", str(error)) from error
    except (StalledError, IntakeFullError) as error:
        reason = "STREAM_STALLED" if isinstance(error, StalledError) else "INTAKE_FULL"
        full = refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, str(error))
        full.retry_delay_s = RETRY_S
        raise full from error
    except LeaseLostError as error:
        raise refuse(grpc.StatusCode.NOT_FOUND, "LEASE_LOST", error.args[0]) from error
    except ContentConflictError as error:
        raise refuse(grpc.StatusCode.ALREADY_EXISTS, "CONTENT_CONFLICT", str(error)) from error
    except PictureMissingError as error:
        raise refuse(FAILED, "PICTURE_MISSING", str(error)) from error
    except UnknownPolicyError as error:
        raise refuse(FAILED, "UNKNOWN_POLICY", str(error)) from error
    except ValueError as error:
        code = grpc.StatusCode.INVALID_ARGUMENT
        raise refuse(code, "MALFORMED_TRAJECTORY", str(error)) from error
