"""Codecs of policies and the manifests of their weights."""

from collections.abc import Sequence

from flotilla.learner.v1 import policy_pb2
from flotilla_common.domain.policy import PolicyId
from flotilla_common.weights.fingerprint import TensorEntry


def encode_policy(policy: PolicyId) -> policy_pb2.PolicyId:
    return policy_pb2.PolicyId(
        run_epoch=policy.run_epoch, version=policy.version, fingerprint=policy.fingerprint
    )


def decode_policy(message: policy_pb2.PolicyId) -> PolicyId:
    return PolicyId(message.run_epoch, message.version, message.fingerprint)


def encode_manifest(entries: Sequence[TensorEntry], total_bytes: int) -> policy_pb2.WeightManifest:
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


def decode_manifest(message: policy_pb2.WeightManifest) -> tuple[TensorEntry, ...]:
    return tuple(
        TensorEntry(t.name, t.dtype, tuple(t.shape), t.offset_bytes, t.checksum)
        for t in message.tensors
    )
