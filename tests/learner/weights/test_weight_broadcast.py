"""The transport by which each worker is to load a publication."""

from pathlib import Path

import numpy as np
import pytest

from flotilla_common.domain.policy import PolicyId
from flotilla_learner.types import Publication
from flotilla_learner.weights.attached_worker import AttachedWorker
from flotilla_learner.weights.weight_broadcast import Announcement, WeightBroadcast

NOTHING = np.zeros(0, np.float32)


def announced(version: int) -> Announcement:
    policy = PolicyId(1, version, bytes([version]) * 32)
    tokens = np.zeros(0, np.int32)
    written = Publication(version, policy.fingerprint, (), 0, Path("slot"), tokens, NOTHING)
    return Announcement(policy, written)


async def transports_of(
    member: AttachedWorker, broadcast: WeightBroadcast, versions: range
) -> list[str]:
    """Return the transport of each publication to a member that loads them all."""
    chosen: list[str] = []
    for version in versions:
        broadcast.announce_policy(announced(version))
        update = await broadcast.next_update(member, 5.0)
        assert update is not None
        assert broadcast.verify_canary(member.worker_id, update.announcement.policy, NOTHING)
        chosen.append(update.transport)
    return chosen


@pytest.mark.parametrize(
    ("shares_memory", "transfer", "sent", "then"),
    [
        (True, None, True, "shm"),
        (False, None, True, "grpc"),
        (False, "gloo", True, "gloo"),
        (True, "nccl", True, "nccl"),
        (True, "gloo", False, "shm"),
        (False, "gloo", False, "grpc"),
    ],
)
async def test_a_worker_fetches_its_first_weights_and_gets_the_next_by_the_best_way(
    shares_memory: bool, transfer: str | None, sent: bool, then: str
) -> None:
    broadcast = WeightBroadcast(
        canary_tolerance=1.0, attach_grace_s=1.0, can_send=lambda policy, devices: sent
    )
    member = AttachedWorker("w", "i", 1, shares_memory, can_fetch=True, transfer=transfer)
    broadcast.attach_worker(member)
    assert await transports_of(member, broadcast, range(3)) == ["grpc", then, then]


async def test_an_engine_on_other_devices_than_the_senders_reads_shared_memory() -> None:
    broadcast = WeightBroadcast(
        canary_tolerance=1.0,
        attach_grace_s=1.0,
        can_send=lambda policy, devices: devices <= {"GPU-1", "GPU-2"},
    )
    for name, devices, then in (("w1", {"GPU-1"}, "ipc"), ("w2", {"GPU-1", "GPU-3"}, "shm")):
        member = AttachedWorker(
            name, "i", 1, True, True, transfer="ipc", shared_devices=frozenset(devices)
        )
        broadcast.attach_worker(member)
        assert await transports_of(member, broadcast, range(3)) == ["grpc", then, then]


async def test_a_worker_that_failed_to_load_fetches_everything_again() -> None:
    broadcast = WeightBroadcast(
        canary_tolerance=1.0, attach_grace_s=1.0, can_send=lambda policy, devices: True
    )
    member = AttachedWorker("w", "i", 1, shares_memory=False, can_fetch=True, transfer="gloo")
    broadcast.attach_worker(member)
    assert await transports_of(member, broadcast, range(2)) == ["grpc", "gloo"]
    broadcast.note_failed("w")
    again = await broadcast.next_update(member, 5.0)
    assert again is not None
    assert (again.transport, again.reload) == ("grpc", True)
    assert await transports_of(member, broadcast, range(2, 3)) == ["gloo"]
