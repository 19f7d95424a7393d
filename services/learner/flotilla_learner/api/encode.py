"""Conversion of the learner's own types into protobuf."""

from collections.abc import Sequence as Items

from flotilla.learner.v1 import group_service_pb2 as groups_pb
from flotilla_common.rpc.rpc import to_duration
from flotilla_common.wire.enums import PURPOSES
from flotilla_common.wire.policy import encode_policy
from flotilla_learner.group_types import Lease


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
        purpose=PURPOSES.encode(group.purpose),
        sampling=groups_pb.SamplingParameters(
            temperature=group.temperature,
            top_k=group.top_k or None,
            top_p=group.top_p if group.top_k else None,
        ),
        min_policy=encode_policy(lease.min_policy),
        eval_id=group.eval_id,
        group_deadline=to_duration(max(0.0, remaining_s)),
        lease_ttl=to_duration(ttl_s),
        max_tries=tries,
        run_epoch=run_epoch,
    )
    if group.exact_policy:
        message.exact_policy.CopyFrom(encode_policy(group.exact_policy))
    return message
