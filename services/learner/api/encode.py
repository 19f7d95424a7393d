"""Conversion of the learner's own types into protobuf."""

from collections.abc import Sequence as Items

from flotilla.learner.v1 import group_service_pb2 as groups_pb
from flotilla.learner.v1 import policy_pb2
from services.common.domain.attempts import Purpose
from services.common.domain.policy import PolicyId
from services.common.fingerprint import TensorEntry
from services.common.rpc import to_duration
from services.learner.group_types import Lease

_PURPOSES = {Purpose.TRAIN: groups_pb.PURPOSE_TRAIN, Purpose.EVAL: groups_pb.PURPOSE_EVAL}


def policy_message(policy: PolicyId) -> policy_pb2.PolicyId:
    return policy_pb2.PolicyId(
        run_epoch=policy.run_epoch, version=policy.version, fingerprint=policy.fingerprint
    )


def manifest_message(entries: Items[TensorEntry], total_bytes: int) -> policy_pb2.WeightManifest:
    tensors = [
        policy_pb2.TensorEntry(
            name=entry.name,
            dtype=entry.dtype,
            shape=entry.shape,
            offset_bytes=entry.offset_bytes,
            checksum=entry.checksum,
        )
        for entry in entries
    ]
    return policy_pb2.WeightManifest(tensors=tensors, total_bytes=total_bytes)


def lease_message(
    lease: Lease, seeds: Items[int], *, run_epoch: int, remaining_s: float, ttl_s: float, tries: int
) -> groups_pb.Lease:
    """Encode a lease; `seeds` belong to its attempts, in order."""
    group = lease.group
    attempts = [
        groups_pb.LeasedAttempt(attempt_index=index, next_try=next_try, seed=seed)
        for (index, next_try), seed in zip(lease.attempts, seeds, strict=True)
    ]
    message = groups_pb.Lease(
        lease_id=lease.lease_id,
        group_id=group.group_id,
        task_json=group.task.json,
        attempts=attempts,
        purpose=_PURPOSES[group.purpose],
        sampling=groups_pb.SamplingParameters(temperature=group.temperature),
        min_policy=policy_message(lease.min_policy),
        eval_id=group.eval_id,
        group_deadline=to_duration(max(0.0, remaining_s)),
        lease_ttl=to_duration(ttl_s),
        max_tries=tries,
        run_epoch=run_epoch,
    )
    if group.exact_policy:
        message.exact_policy.CopyFrom(policy_message(group.exact_policy))
    return message
