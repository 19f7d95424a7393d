"""Leases from the learner, and submissions to it."""

import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar, cast

import grpc
import grpc.aio

from flotilla.learner.v1 import group_service_pb2 as group_pb
from flotilla.learner.v1 import group_service_pb2_grpc as group_grpc
from flotilla_common.aio.bounded_dict import BoundedDict
from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.rpc.rpc import describe_error, refusal_reason
from flotilla_common.telemetry.log import get_logger
from flotilla_common.wire.policy import encode_policy
from flotilla_common.wire.trajectory import encode_submission
from flotilla_rollout.adapters.learner_calls import Metadata, RunEpoch, WorkerIdentity
from flotilla_rollout.adapters.retried_calls import TRANSIENT, call_with_retries
from flotilla_rollout.api.codec import lease_from_pb
from flotilla_rollout.episodes.attempt_record import make_submission
from flotilla_rollout.ports import LearnerRefused, LeaseLost
from flotilla_rollout.types import Lease

if TYPE_CHECKING:
    from flotilla.learner.v1.group_service_pb2_grpc import GroupServiceAsyncStub

T = TypeVar("T")

# Longer than the learner holds a poll; an interrupted poll is repeated under its request id.
POLL_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 10.0
WITHDRAW_TIMEOUT_S = 1.0
MOST_KNOWN_TOOLS = 4096
MOST_KNOWN_PICTURES = 2**16

log = get_logger(__name__)


class _PictureMissing(LearnerRefused):
    """The learner has lost a picture that it had acknowledged."""


class GroupClient:
    """Client of leases and submissions."""

    def __init__(
        self, channel: grpc.aio.Channel, identity: WorkerIdentity, epoch: RunEpoch
    ) -> None:
        self._stub = cast("GroupServiceAsyncStub", group_grpc.GroupServiceStub(channel))
        self._identity = identity
        self._epoch = epoch
        self._request_id = uuid.uuid4().hex
        # The unanswered poll.
        self._poll: group_pb.LeaseGroupRequest | None = None
        # Epochs and digests whose tools the learner has acknowledged.
        self._known_tools: BoundedDict[tuple[Metadata, str], None] = BoundedDict(MOST_KNOWN_TOOLS)
        # Epochs, groups and hashes of pictures that it has acknowledged.
        self._known_pictures: BoundedDict[tuple[Metadata, str, str], None] = BoundedDict(
            MOST_KNOWN_PICTURES
        )

    async def lease_group(self, holding: PolicyId, free_attempts: int) -> Lease | None:
        request = self._lease_request(holding, free_attempts)
        self._poll = request
        answer = await self._call_learner(
            lambda left, md: self._stub.LeaseGroup(
                request, timeout=min(left, POLL_TIMEOUT_S), metadata=md
            ),
            POLL_TIMEOUT_S,
            none_when_away=True,
        )
        if answer is None:
            return None
        self._poll, self._request_id = None, uuid.uuid4().hex
        self._epoch.adopt_epoch(answer.run_epoch)
        return lease_from_pb(answer.lease) if answer.HasField("lease") else None

    def _lease_request(self, holding: PolicyId, free_attempts: int) -> group_pb.LeaseGroupRequest:
        tokenizer = self._identity.tokenizer
        return group_pb.LeaseGroupRequest(
            request_id=self._request_id,
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            holding=encode_policy(holding),
            free_attempts=free_attempts,
            capabilities=self._identity.capabilities,
            tokenizer_digest=tokenizer.whole,
            tokenizer_json_digest=tokenizer.tokenizer_json,
            chat_template_digest=tokenizer.chat_template,
        )

    async def renew_leases(self, lease_ids: Sequence[str]) -> Collection[str]:
        request = group_pb.RenewLeasesRequest(
            worker_id=self._identity.worker_id, lease_ids=lease_ids
        )
        answer = await self._call_learner(
            lambda left, md: self._stub.RenewLeases(request, timeout=left, metadata=md),
            CALL_TIMEOUT_S,
            none_when_away=True,
        )
        return () if answer is None else answer.lost_lease_ids

    async def release_leases(self, lease_ids: Sequence[str]) -> None:
        request = group_pb.ReleaseLeasesRequest(
            worker_id=self._identity.worker_id, lease_ids=lease_ids
        )
        await self._call_learner(
            lambda left, md: self._stub.ReleaseLeases(request, timeout=left, metadata=md),
            CALL_TIMEOUT_S,
            none_when_away=True,
        )

    async def withdraw_poll(self) -> None:
        """Repeat an interrupted poll without room for a lease: only a stored answer can come."""
        poll, self._poll = self._poll, None
        if poll is None:
            return
        poll.free_attempts = 0
        try:
            answer = await self._epoch.call_with_epoch(
                lambda md: self._stub.LeaseGroup(poll, timeout=WITHDRAW_TIMEOUT_S, metadata=md)
            )
        except grpc.aio.AioRpcError as error:
            # Nothing was granted, or the learner is away and the lease expires.
            log.debug("nothing to withdraw", reason=describe_error(error))
            return
        if answer.HasField("lease"):
            await self.release_leases([answer.lease.lease_id])

    async def submit_trajectory(
        self, lease: Lease, trajectory: Trajectory, timeout_s: float
    ) -> bool:
        submission = make_submission(trajectory, lease, self._identity.worker_id)
        # Under an epoch, because a learner may resume without its disk.
        known = (self._epoch.metadata, submission.facts.tool_schema_digest)
        if known in self._known_tools:
            submission = replace(submission, tools=b"")
        try:
            answer = await self._send_pictures_once(submission, timeout_s)
        except grpc.aio.AioRpcError as error:
            # After the group's deadline the learner accepts nothing of it.
            raise LeaseLost(
                f"not submitted in {timeout_s:.0f} s: {describe_error(error)}"
            ) from error
        if submission.tools:
            self._known_tools[known] = None
        return answer is not None and answer.group_complete

    async def _send_pictures_once(
        self, submission: Trajectory, timeout_s: float
    ) -> group_pb.SubmitTrajectoryResponse | None:
        """Submit without the pictures that the learner has for the group, but again with all of
        them if it lacks one."""
        epoch, group, pictures = self._epoch.metadata, submission.key.group_id, submission.pictures
        new = {
            sha256: data
            for sha256, data in pictures.items()
            if (epoch, group, sha256) not in self._known_pictures
        }
        started = time.monotonic()
        try:
            answer = await self._submit(replace(submission, pictures=new), timeout_s)
        except _PictureMissing:
            if len(new) == len(pictures):
                raise
            answer = await self._submit(submission, timeout_s - (time.monotonic() - started))
        for sha256 in pictures:
            self._known_pictures[epoch, group, sha256] = None
        return answer

    async def _submit(
        self, submission: Trajectory, timeout_s: float
    ) -> group_pb.SubmitTrajectoryResponse | None:
        return await self._call_learner(
            lambda left, md: self._stub.SubmitTrajectory(
                encode_submission(submission), timeout=left, metadata=md
            ),
            timeout_s,
        )

    async def _call_learner(
        self,
        send: Callable[[float, Metadata], Awaitable[T]],
        budget_s: float,
        *,
        none_when_away: bool = False,
    ) -> T | None:
        """Retry while the learner is away; its refusals become LeaseLost or LearnerRefused."""
        try:
            return await call_with_retries(
                lambda left: self._epoch.call_with_epoch(lambda md: send(left, md)), budget_s
            )
        except grpc.aio.AioRpcError as error:
            if refusal_reason(error) == "LEASE_LOST":
                raise LeaseLost(describe_error(error)) from error
            if refusal_reason(error) == "PICTURE_MISSING":
                raise _PictureMissing(describe_error(error)) from error
            # A STALE_EPOCH without a newer epoch comes from a learner that is being replaced.
            if error.code() not in TRANSIENT and refusal_reason(error) != "STALE_EPOCH":
                raise LearnerRefused(describe_error(error)) from error
            if not none_when_away:
                raise
            log.warning("learner away", reason=describe_error(error))
            return None
