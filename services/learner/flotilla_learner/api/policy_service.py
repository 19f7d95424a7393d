"""Server of `flotilla.learner.v1.PolicyService`. The proto holds the contract."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import numpy as np

from flotilla.learner.v1 import policy_service_pb2 as pb
from flotilla.learner.v1 import policy_service_pb2_grpc
from flotilla_common.aio.background_tasks import BackgroundTasks
from flotilla_common.domain.policy import PolicyId
from flotilla_common.images.picture import ShownPicture
from flotilla_common.process.host_identity import host_digest
from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.rpc.rpc import to_duration
from flotilla_common.telemetry.log import get_logger
from flotilla_common.weights.fingerprint import TokenizerDigests
from flotilla_common.wire.policy import decode_policy, encode_manifest, encode_policy
from flotilla_learner.api.request_checks import (
    MOST_DEVICES,
    Context,
    bounded_workers,
    check_epoch,
    check_name_list,
    check_names,
    check_tokenizer,
    digests_of,
    refuse,
)
from flotilla_learner.api.sequence_decode import MalformedRequestError, to_floats
from flotilla_learner.config.learner import WeightsConfig
from flotilla_learner.groups.dispatcher import GroupDispatcher
from flotilla_learner.guard.mismatch_guard import MismatchGuard
from flotilla_learner.guard.probes import Probe, ProbeError, ProbeResult
from flotilla_learner.weights.attached_worker import AttachedWorker
from flotilla_learner.weights.live_sender import LiveSender
from flotilla_learner.weights.transfer_choice import choose_transfer
from flotilla_learner.weights.weight_broadcast import (
    NoCommonTransportError,
    UnknownWorkerError,
    WeightBroadcast,
    WeightUpdate,
)

_log = get_logger(__name__)
# Time after which a worker attaches again.
_STREAM_S = 1800.0
_TRANSFERS = {"gloo": pb.TRANSPORT_GLOO, "nccl": pb.TRANSPORT_NCCL, "ipc": pb.TRANSPORT_IPC}
_TRANSPORTS = {"shm": pb.TRANSPORT_SHM, "grpc": pb.TRANSPORT_GRPC, **_TRANSFERS}


@dataclass(kw_only=True)
class PolicyService(policy_service_pb2_grpc.PolicyServiceServicer):
    """Adapter between the contract and the broadcast.

    `weight_server` is the address of WeightService; without one, workers must share memory.
    `sender` sends weights into engines as configured by `weights`."""

    broadcast: WeightBroadcast
    dispatcher: GroupDispatcher
    guard: MismatchGuard
    tokenizer: TokenizerDigests
    weight_server: str | None
    sender: LiveSender | None
    weights: WeightsConfig
    sends_from_gpu: bool
    publish_timeout_s: float

    def __post_init__(self) -> None:
        self.broadcast.on_left = self.dispatcher.book.workers.detach_worker
        self._judging = BackgroundTasks()

    async def Attach(
        self, request: pb.AttachRequest, context: Context
    ) -> AsyncIterator[pb.AttachResponse]:
        check_epoch(context, self.dispatcher.run_epoch)
        check_tokenizer(digests_of(request), self.tokenizer)
        member = self._admit_worker(request)
        end = loop_time() + _STREAM_S
        try:
            while update := await self.broadcast.next_update(member, end - loop_time()):
                yield self._update_message(update)
        finally:
            self.broadcast.note_stream_cut(member)
        raise refuse(grpc.StatusCode.UNAVAILABLE, "STREAM_ENDED", "attach again")

    async def ReportPolicy(
        self, request: pb.ReportPolicyRequest, context: Context
    ) -> pb.ReportPolicyResponse:
        check_epoch(context, self.dispatcher.run_epoch)
        # Engines are judged one after another, and a worker whose turn comes later than it waits
        # reports no second time: its verdict counts all the same.
        accepted = await self._judging.run_shielded(self._apply_report(request))
        return pb.ReportPolicyResponse(accepted=accepted)

    async def _apply_report(self, request: pb.ReportPolicyRequest) -> bool:
        policy = decode_policy(request.policy)
        applied = request.outcome == pb.UPDATE_OUTCOME_APPLIED
        try:
            if applied:
                accepted = await self._judge_report(request, policy)
            else:
                self.broadcast.note_failed(request.worker_id)
                accepted = False
        except UnknownWorkerError as error:
            raise refuse(grpc.StatusCode.NOT_FOUND, "UNKNOWN_WORKER", error.args[0]) from error
        except (MalformedRequestError, ProbeError) as error:
            code = grpc.StatusCode.INVALID_ARGUMENT
            raise refuse(code, "MALFORMED_REPORT", str(error)) from error
        if accepted:
            await self.dispatcher.mark_serving(request.worker_id, policy)
        else:
            if applied or request.outcome == pb.UPDATE_OUTCOME_ENGINE_FAILED:
                await self.dispatcher.mark_not_serving(request.worker_id, policy)
            outcome = pb.UpdateOutcome.Name(request.outcome)
            _log.warning(
                "policy refused",
                worker=request.worker_id,
                version=policy.version,
                outcome="canary or probes differ" if applied else outcome,
                detail=request.detail[:500],
            )
        return accepted

    async def _judge_report(self, request: pb.ReportPolicyRequest, policy: PolicyId) -> bool:
        """Return True if an engine serves the policy that it should."""
        worker_id = request.worker_id
        self.broadcast.check_attached(worker_id)
        canary = to_floats(request.canary_logprobs)
        results = [_to_probe_result(result) for result in request.probes]
        agree = await self.guard.probes_agree(worker_id, policy, results)
        if agree and self.broadcast.verify_canary(worker_id, policy, canary):
            return True
        self.broadcast.note_failed(worker_id)
        self.guard.note_refusal(worker_id, policy, canary, results)
        return False

    def _admit_worker(self, request: pb.AttachRequest) -> AttachedWorker:
        book = self.dispatcher.book
        check_names(worker_id=request.worker_id, incarnation=request.incarnation)
        with bounded_workers():
            worker = book.greet_worker(request.worker_id, request.incarnation, loop_time())
        if worker is None:
            message = f"another process has taken the id {request.worker_id}; end this one"
            raise refuse(grpc.StatusCode.NOT_FOUND, "UNKNOWN_WORKER", message)
        # A policy that it holds but has not proved to serve here is sent again, to be scored.
        claimed = decode_policy(request.holding) if request.HasField("holding") else None
        transports = set(request.transports)
        shares_memory = (
            # On a public network no worker does, on this machine or not.
            self.weights.network == "private"
            and pb.TRANSPORT_SHM in transports
            and request.host_digest == host_digest()
        )
        check_name_list("device_ids", request.device_ids, MOST_DEVICES)
        transfer = choose_transfer(
            self.weights,
            [name for name, transport in _TRANSFERS.items() if transport in transports],
            shares_memory=shares_memory,
            has_device_ids=bool(request.device_ids),
            sends_from_gpu=self.sends_from_gpu,
        )
        member = AttachedWorker(
            worker_id=request.worker_id,
            incarnation=request.incarnation,
            devices=request.device_count,
            shares_memory=shares_memory,
            transfer=transfer,
            shared_devices=frozenset(request.device_ids if transfer == "ipc" else ()),
            fetches_changes=self.weights.delta == "auto" and not shares_memory and transfer is None,
            can_fetch=pb.TRANSPORT_GRPC in transports and self.weight_server is not None,
            holding=claimed if claimed == worker.holding else None,
            # An earlier order to reload may have been lost with its stream.
            reload_next=worker.holding is None and worker.refusals > 0,
        )
        book.workers.attach_worker(member.worker_id, member.devices)
        if member.transfer is not None and self.sender is not None:
            self.sender.start_soon()
        try:
            self.broadcast.attach_worker(member)
        except NoCommonTransportError as error:
            code = grpc.StatusCode.FAILED_PRECONDITION
            raise refuse(code, "NO_COMMON_TRANSPORT", str(error)) from error
        return member

    def _update_message(self, update: WeightUpdate) -> pb.AttachResponse:
        policy, publication = update.announcement.policy, update.announcement.publication
        locations = {"shm": str(publication.path), "grpc": self.weight_server or ""}
        sender = (self.sender and self.sender.address) or ""
        canary = publication.canary_token_ids.astype("<i4").tobytes()
        message = pb.Update(
            policy=encode_policy(policy),
            manifest=encode_manifest(publication.manifest, publication.total_bytes),
            transport=_TRANSPORTS[update.transport],
            location=locations.get(update.transport, sender),
            canary_token_ids=canary,
            canary_pictures=[_picture_message(each) for each in publication.canary_pictures],
            reload=update.reload,
            keep=update.keep,
            probes=[_probe_message(probe) for probe in update.announcement.probes],
            publish_timeout=to_duration(self.publish_timeout_s),
        )
        return pb.AttachResponse(update=message, run_epoch=self.dispatcher.run_epoch)


def _picture_message(shown: ShownPicture) -> pb.CanaryPicture:
    return pb.CanaryPicture(
        data=shown.picture.data, token_offset=shown.place.offset, grid=shown.place.grid
    )


def _probe_message(probe: Probe) -> pb.Probe:
    return pb.Probe(
        prompt_token_ids=probe.prompt_token_ids.astype("<i4").tobytes(),
        max_tokens=probe.max_tokens,
        temperature=probe.temperature,
        seed=probe.seed,
    )


def _to_probe_result(message: pb.ProbeResult) -> ProbeResult:
    """Decode a probe's result. Raises MalformedRequestError."""
    if len(message.token_ids) % 4:
        raise MalformedRequestError("a probe's token_ids are not a whole number of int32")
    token_ids = np.frombuffer(message.token_ids, dtype="<i4").astype(np.int32)
    return ProbeResult(token_ids, to_floats(message.logprobs))
