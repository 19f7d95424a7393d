"""The learner as a rollout worker sees it: leases, submissions, and new weights."""

import json
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

from flotilla.learner.v1 import group_service_pb2 as group_pb
from flotilla.learner.v1 import group_service_pb2_grpc as group_grpc
from flotilla.learner.v1 import policy_service_pb2 as policy_pb
from flotilla.learner.v1 import policy_service_pb2_grpc as policy_grpc
from flotilla.learner.v1 import weight_service_pb2 as weight_pb
from flotilla.learner.v1 import weight_service_pb2_grpc as weight_grpc
from services.common.domain.policy import PolicyId
from services.common.fingerprint import TokenizerDigests
from services.common.host_identity import host_digest
from services.common.log import get_logger
from services.common.rpc import service_error
from services.rollout.adapters.retried_calls import (
    TRANSIENT,
    call_with_retries,
    describe_error,
    refusal_reason,
)
from services.rollout.api.codec import (
    lease_from_pb,
    policy_to_pb,
    publication_from_pb,
    report_to_pb,
    submission_to_pb,
)
from services.rollout.ports import LearnerRefused, LeaseLost, TransportFailed
from services.rollout.types import Completion, Lease, Publication, Trajectory, UpdateOutcome

if TYPE_CHECKING:
    from flotilla.learner.v1.group_service_pb2_grpc import GroupServiceAsyncStub
    from flotilla.learner.v1.policy_service_pb2_grpc import PolicyServiceAsyncStub
    from flotilla.learner.v1.weight_service_pb2_grpc import WeightServiceAsyncStub

T = TypeVar("T")
Metadata = tuple[tuple[str, str], ...]

EPOCH_KEY = "flotilla-run-epoch"
# Longer than the learner holds a poll; a poll that is cut is repeated under its request id.
POLL_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 10.0
REPORT_BUDGET_S = 30.0
WITHDRAW_TIMEOUT_S = 1.0

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Identity of the caller. `incarnation` is new for every process."""

    worker_id: str
    incarnation: str
    device_count: int
    tokenizer: TokenizerDigests


class RunEpoch:
    """The learner's run epoch as last heard; every call carries it."""

    def __init__(self) -> None:
        self._value: int | None = None

    @property
    def metadata(self) -> Metadata:
        return () if self._value is None else ((EPOCH_KEY, str(self._value)),)

    def adopt_epoch(self, value: int) -> bool:
        """Take a newer epoch; False for one that is not newer: that learner is a ghost."""
        if self._value is not None and value <= self._value:
            return False
        self._value = value
        return True

    async def call_with_epoch(self, send: Callable[[Metadata], Awaitable[T]]) -> T:
        """Return `send(metadata)`, called once more if the learner tells a newer epoch."""
        try:
            return await send(self.metadata)
        except grpc.aio.AioRpcError as error:
            if not self.adopt_from_refusal(error):
                raise
        return await send(self.metadata)

    def adopt_from_refusal(self, error: grpc.aio.AioRpcError) -> bool:
        """Take the epoch out of a STALE_EPOCH refusal; False when there is nothing newer."""
        refused = service_error(error)
        if refused is None or refused.reason != "STALE_EPOCH":
            return False
        told = refused.metadata.get("run_epoch", "")
        return told.lstrip("-").isdecimal() and self.adopt_epoch(int(told))


class GroupClient:
    """Client of leases and submissions."""

    def __init__(
        self, channel: grpc.aio.Channel, identity: WorkerIdentity, epoch: RunEpoch
    ) -> None:
        self._stub = cast("GroupServiceAsyncStub", group_grpc.GroupServiceStub(channel))
        self._identity = identity
        self._epoch = epoch
        self._request_id = uuid.uuid4().hex
        # The poll whose answer has not come.
        self._poll: group_pb.LeaseGroupRequest | None = None

    async def lease_group(self, holding: PolicyId, free_attempts: int) -> Lease | None:
        request = group_pb.LeaseGroupRequest(
            request_id=self._request_id,
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            holding=policy_to_pb(holding),
            free_attempts=free_attempts,
            tokenizer_digest=self._identity.tokenizer.whole,
            tokenizer_json_digest=self._identity.tokenizer.tokenizer_json,
            chat_template_digest=self._identity.tokenizer.chat_template,
        )
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
        """Repeat a poll that was cut short, with room for nothing: only a stored answer comes."""
        poll, self._poll = self._poll, None
        if poll is None:
            return
        poll.free_attempts = 0
        try:
            answer = await self._epoch.call_with_epoch(
                lambda md: self._stub.LeaseGroup(poll, timeout=WITHDRAW_TIMEOUT_S, metadata=md)
            )
        except grpc.aio.AioRpcError as error:
            # Nothing was granted; or the learner is away, and the lease ends by itself.
            log.debug("nothing to withdraw", reason=describe_error(error))
            return
        if answer.HasField("lease"):
            await self.release_leases([answer.lease.lease_id])

    async def submit_trajectory(
        self, lease: Lease, trajectory: Trajectory, timeout_s: float
    ) -> bool:
        task: dict[str, Any] = json.loads(lease.task_json)
        worker_id = self._identity.worker_id
        try:
            answer = await self._call_learner(
                lambda left, md: self._stub.SubmitTrajectory(
                    submission_to_pb(lease.lease_id, worker_id, task, trajectory),
                    timeout=left,
                    metadata=md,
                ),
                timeout_s,
            )
        except grpc.aio.AioRpcError as error:
            # Beyond the group's deadline nothing of it is taken any more.
            raise LeaseLost(
                f"not submitted in {timeout_s:.0f} s: {describe_error(error)}"
            ) from error
        return answer is not None and answer.group_complete

    async def _call_learner(
        self,
        send: Callable[[float, Metadata], Awaitable[T]],
        budget_s: float,
        *,
        none_when_away: bool = False,
    ) -> T | None:
        """Repeat while the learner is away; its refusals become LeaseLost or LearnerRefused."""
        try:
            return await call_with_retries(
                lambda left: self._epoch.call_with_epoch(lambda md: send(left, md)), budget_s
            )
        except grpc.aio.AioRpcError as error:
            if refusal_reason(error) == "LEASE_LOST":
                raise LeaseLost(describe_error(error)) from error
            # A STALE_EPOCH that told nothing newer comes from a learner that is being replaced.
            if error.code() not in TRANSIENT and refusal_reason(error) != "STALE_EPOCH":
                raise LearnerRefused(describe_error(error)) from error
            if not none_when_away:
                raise
            log.warning("learner away", reason=describe_error(error))
            return None


class PolicyClient:
    """Client of announcements of weights, reports on them, and their bytes over gRPC."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        identity: WorkerIdentity,
        epoch: RunEpoch,
        *,
        weights: Callable[[str], grpc.aio.Channel],
    ) -> None:
        """Take `weights`, which opens a channel to WeightService, wherever the learner says it
        is."""
        self._stub = cast("PolicyServiceAsyncStub", policy_grpc.PolicyServiceStub(channel))
        self._identity = identity
        self._epoch = epoch
        self._weights = weights

    async def stream_publications(self, holding: PolicyId | None) -> AsyncGenerator[Publication]:
        request = policy_pb.AttachRequest(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            device_count=self._identity.device_count,
            transports=[policy_pb.TRANSPORT_SHM, policy_pb.TRANSPORT_GRPC],
            holding=None if holding is None else policy_to_pb(holding),
            host_digest=host_digest(),
            tokenizer_digest=self._identity.tokenizer.whole,
            tokenizer_json_digest=self._identity.tokenizer.tokenizer_json,
            chat_template_digest=self._identity.tokenizer.chat_template,
        )
        try:
            async for event in self._stub.Attach(request, metadata=self._epoch.metadata):
                self._epoch.adopt_epoch(event.run_epoch)
                if event.HasField("update"):
                    yield publication_from_pb(event.update)
        except grpc.aio.AioRpcError as error:
            stale = refusal_reason(error) == "STALE_EPOCH"
            if not stale and error.code() not in TRANSIENT:
                raise LearnerRefused(describe_error(error)) from error
            self._epoch.adopt_from_refusal(error)

    async def report_update(
        self,
        publication: Publication,
        outcome: UpdateOutcome,
        canary_logprobs: NDArray[np.float32],
        detail: str,
        probed: Sequence[Completion] = (),
    ) -> bool:
        request = report_to_pb(
            self._identity.worker_id, publication, outcome, canary_logprobs, detail, probed
        )
        try:
            answer = await call_with_retries(
                lambda left: self._epoch.call_with_epoch(
                    lambda md: self._stub.ReportPolicy(request, timeout=left, metadata=md)
                ),
                REPORT_BUDGET_S,
            )
        except grpc.aio.AioRpcError as error:
            # Attaching again tells the learner what is held; it then judges anew.
            log.warning("policy not reported", reason=describe_error(error))
            return True
        return answer.accepted

    async def fetch_weights(self, publication: Publication, offset: int) -> AsyncGenerator[bytes]:
        """Yield chunks from `offset` on. Raises TransportFailed when the stream breaks."""
        request = weight_pb.FetchWeightsRequest(
            policy=policy_to_pb(publication.policy), offset_bytes=offset
        )
        async with self._weights(publication.location) as channel:
            stub = cast("WeightServiceAsyncStub", weight_grpc.WeightServiceStub(channel))
            try:
                async for answer in stub.FetchWeights(request, metadata=self._epoch.metadata):
                    if answer.offset_bytes != offset:
                        raise TransportFailed(
                            f"got bytes at {answer.offset_bytes}, asked for {offset}"
                        )
                    offset += len(answer.chunk)
                    yield answer.chunk
            except grpc.aio.AioRpcError as error:
                raise TransportFailed(describe_error(error)) from error
