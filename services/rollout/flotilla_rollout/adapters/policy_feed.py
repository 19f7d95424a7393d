"""Announcements and bytes of new weights from the learner, and reports on them."""

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, cast

import grpc
import grpc.aio
import numpy as np
from numpy.typing import NDArray

from flotilla.learner.v1 import policy_service_pb2 as policy_pb
from flotilla.learner.v1 import policy_service_pb2_grpc as policy_grpc
from flotilla.learner.v1 import weight_service_pb2 as weight_pb
from flotilla.learner.v1 import weight_service_pb2_grpc as weight_grpc
from flotilla_common.domain.policy import PolicyId
from flotilla_common.process.host_identity import host_digest
from flotilla_common.rpc.rpc import describe_error, refusal_reason
from flotilla_common.telemetry.log import get_logger
from flotilla_common.wire.policy import encode_policy
from flotilla_rollout.adapters.learner_calls import RunEpoch, WorkerIdentity
from flotilla_rollout.adapters.retried_calls import TRANSIENT, call_with_retries
from flotilla_rollout.api.codec import publication_from_pb, report_to_pb
from flotilla_rollout.ports import LearnerRefused, TransportFailed
from flotilla_rollout.types import Completion, FetchedPart, Publication, UpdateOutcome

if TYPE_CHECKING:
    from flotilla.learner.v1.policy_service_pb2_grpc import PolicyServiceAsyncStub
    from flotilla.learner.v1.weight_service_pb2_grpc import WeightServiceAsyncStub

REPORT_BUDGET_S = 30.0

log = get_logger(__name__)


class PolicyClient:
    """Client for announcements of weights, reports on them, and their bytes over gRPC."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        identity: WorkerIdentity,
        epoch: RunEpoch,
        *,
        weights: Callable[[str], grpc.aio.Channel],
        transfers: Sequence[str] = (),
        device_ids: Sequence[str] = (),
    ) -> None:
        """Create a client. `weights` opens a channel to WeightService at the address that the
        learner gives. The engine can receive weights over `transfers`; `device_ids` are the
        identities of its devices."""
        self._stub = cast("PolicyServiceAsyncStub", policy_grpc.PolicyServiceStub(channel))
        self._identity = identity
        self._epoch = epoch
        self._weights = weights
        self._transfers = transfers
        self._device_ids = device_ids

    async def stream_publications(self, holding: PolicyId | None) -> AsyncGenerator[Publication]:
        request = self._make_attach_request(holding)
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
            # Attaching again reports the held weights to the learner, which then judges them again.
            log.warning("policy not reported", reason=describe_error(error))
            return True
        return answer.accepted

    async def fetch_weights(
        self, publication: Publication, offset: int, held: PolicyId | None = None
    ) -> AsyncGenerator[FetchedPart]:
        """Yield parts from `offset` on. Raises TransportFailed when the stream breaks."""
        request = weight_pb.FetchWeightsRequest(
            policy=encode_policy(publication.policy),
            offset_bytes=offset,
            held=None if held is None else encode_policy(held),
        )
        async with self._weights(publication.location) as channel:
            stub = cast("WeightServiceAsyncStub", weight_grpc.WeightServiceStub(channel))
            try:
                async for answer in stub.FetchWeights(request, metadata=self._epoch.metadata):
                    if answer.offset_bytes != offset:
                        raise TransportFailed(
                            f"got bytes at {answer.offset_bytes}, expected {offset}"
                        )
                    offset += answer.delta_bytes or len(answer.chunk)
                    yield FetchedPart(answer.chunk, answer.delta_bytes)
            except grpc.aio.AioRpcError as error:
                raise TransportFailed(describe_error(error)) from error

    def _make_attach_request(self, holding: PolicyId | None) -> policy_pb.AttachRequest:
        identity, names = self._identity, (*self._transfers, "shm", "grpc")
        return policy_pb.AttachRequest(
            worker_id=identity.worker_id,
            incarnation=identity.incarnation,
            device_count=identity.device_count,
            transports=[policy_pb.Transport.Value(f"TRANSPORT_{name.upper()}") for name in names],
            holding=None if holding is None else encode_policy(holding),
            host_digest=host_digest(),
            tokenizer_digest=identity.tokenizer.whole,
            tokenizer_json_digest=identity.tokenizer.tokenizer_json,
            chat_template_digest=identity.tokenizer.chat_template,
            device_ids=self._device_ids,
        )
