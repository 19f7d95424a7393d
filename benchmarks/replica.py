"""A rollout's connection to a learner, with an engine that accepts all weights."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla_common.aio.concurrency import running_tasks
from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.trajectory import Trajectory, content_digest
from flotilla_common.images.picture import ShownPicture
from flotilla_common.rpc import rpc
from flotilla_common.weights.fingerprint import TokenizerDigests
from flotilla_rollout.adapters.fake import FakeEngine
from flotilla_rollout.adapters.learner import GroupClient
from flotilla_rollout.adapters.learner_calls import RunEpoch, WorkerIdentity
from flotilla_rollout.adapters.policy_feed import PolicyClient
from flotilla_rollout.ports import EngineError
from flotilla_rollout.types import Completion, Lease, PolicySpan, Sampling
from flotilla_rollout.work.weight_updater import WeightUpdater
from tests.support.learner import TOKEN, TOKENIZER
from tests.support.rollout import tokenizer

# The same as those of the benchmark's ranks.
_CANARY_LOGPROB = -1.0


class AgreeingEngine(FakeEngine):
    """Engine with the same scores as the benchmark's ranks."""

    def __init__(self) -> None:
        super().__init__(tokenizer(), 0)

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        max_tokens: int,
        timeout_s: float = inf,
        pictures: Sequence[ShownPicture] = (),
    ) -> Completion:
        if self.policy is None:
            raise EngineError("no policy is loaded")
        ids, logprobs = np.zeros(max_tokens, np.int32), np.full(max_tokens, -0.5, np.float32)
        return Completion(ids, logprobs, (PolicySpan(self.policy, max_tokens),), cut=False)

    async def compute_logprobs(
        self, token_ids: NDArray[np.int32], pictures: Sequence[ShownPicture] = ()
    ) -> NDArray[np.float32]:
        return np.full(len(token_ids) - 1, _CANARY_LOGPROB, np.float32)


@dataclass(frozen=True, slots=True)
class Replica:
    """Clients of one worker, and the loop that updates its engine."""

    groups: GroupClient
    follower: WeightUpdater
    # Ends only if the loop fails.
    updating: asyncio.Task[Any]


@asynccontextmanager
async def connect_replica(
    address: str, folder: Path, number: int, engine: FakeEngine
) -> AsyncGenerator[Replica]:
    """Connect one replica to a learner, with its own channel."""
    digests, epoch = TokenizerDigests(TOKENIZER), RunEpoch()
    identity = WorkerIdentity(f"rollout-{number}", uuid.uuid4().hex, 1, digests)
    channel = rpc.channel(address, token=TOKEN)

    def open_weights(there: str) -> Any:
        return rpc.channel(there, token=TOKEN, peer="learner")

    feed = PolicyClient(channel, identity, epoch, weights=open_weights)
    follower = WeightUpdater(feed, engine, folder / f"staged-{number}")
    try:
        async with running_tasks(follower.keep_updating()) as (updating,):
            yield Replica(GroupClient(channel, identity, epoch), follower, updating)
    finally:
        await channel.close()


def written_for(trajectory: Trajectory, lease: Lease, index: int, policy: PolicyId) -> Trajectory:
    """Return a trajectory rewritten for a leased attempt and this policy."""
    sequences = tuple(
        replace(
            sequence,
            spans=tuple(
                span._replace(policy=policy) if span.policy else span for span in sequence.spans
            ),
        )
        for sequence in trajectory.sequences
    )
    return replace(
        trajectory,
        key=AttemptKey(lease.group_id, index, 0),
        lease_id=lease.lease_id,
        sequences=sequences,
        content_digest=content_digest(sequences),
    )
