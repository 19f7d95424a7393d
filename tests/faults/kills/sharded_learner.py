"""A whole learner with two rank processes, each with a part of the parameters, to be killed."""

import asyncio
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from flotilla_common.spec.spec import PolicyConfig
from flotilla_common.weights.fingerprint import TokenizerDigests
from flotilla_learner.app import run_learner
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.dependencies import LearnerDependencies
from flotilla_learner.ranks import rank_process
from flotilla_learner.ranks.cluster import ClusterSite, RayCluster
from flotilla_learner.ranks.local_ranks import LocalRanks
from flotilla_learner.tracking.adapters.jsonl import JsonlTracker
from flotilla_learner.types import Comparison, ModelInfo, Publication, TrainBatch
from tests.support.fake_ranks import FakeRanks
from tests.support.learner import TOKENIZER, make_config, make_runtime
from tests.support.process_forge import ProcessForge
from tests.support.rank_configs import policy_config

RANKS = 2


@dataclass(frozen=True, slots=True)
class ShardedLife:
    """One start of a learner, whose ranks are forked by the forge at this address."""

    folder: Path
    model: Path
    forge: Path
    port: int
    steps: int
    checkpoint_every: int
    # Of the head that joins a further machine with the second rank; 0: both are here.
    ray_port: int = 0


class TrustedRanks(LocalRanks):
    """Real ranks whose engines are beyond doubt: `FakeWorker` samples from no weights.

    What they are started from is kept in `read`, as they found it."""

    def __init__(
        self,
        folder: Path,
        policy: PolicyConfig,
        config: LearnerConfig,
        shm_dir: Path,
        cluster: RayCluster | None = None,
    ) -> None:
        shm_dir.mkdir(exist_ok=True)
        super().__init__("sharded", policy, config, folder / "rank.log", shm_dir, cluster)
        self._read = folder / "read"
        self._fake = FakeRanks(folder)

    async def start_ranks(self, checkpoint: Path | None) -> ModelInfo:
        if checkpoint is not None:
            number = len(list(self._read.glob("*"))) + 1
            shutil.copytree(checkpoint, self._read / f"{number}-{checkpoint.name}")
        return await super().start_ranks(checkpoint)

    async def publish_weights(self, version: int) -> Publication:
        published = await super().publish_weights(version)
        sure = published.canary_logprobs * 0 - 1
        return replace(published, canary_logprobs=sure)

    async def compare_batch(self, batch: TrainBatch, *, diagnose: bool = False) -> Comparison:
        return await self._fake.compare_batch(batch, diagnose=diagnose)


def sharded_config(
    folder: Path, steps: int, checkpoint_every: int, ray_port: int = 0
) -> LearnerConfig:
    """Return the configuration of a run. Adam's `eps` keeps roundings of a gradient that is next to
    nothing from becoming whole steps."""
    return make_config(
        folder,
        steps=steps,
        groups_per_step=2,
        group_size=2,
        max_staleness=1,
        lease_ttl_s=0.4,
        attach_grace_s=0.1,
        checkpoint={"every": checkpoint_every, "keep": 2},
        optimizer={"lr": 1e-3, "eps": 1e-4},
        rank={
            **(several_machines(ray_port) if ray_port else {"processes": RANKS, "shard": True}),
            "pack_tokens": 64,
            "head_chunk": 16,
            "burn_in": {"enabled": False},
        },
    )


def several_machines(ray_port: int) -> dict[str, object]:
    return {"nodes": RANKS, "ray_port": ray_port, "join_s": 120.0}


async def live_sharded(life: ShardedLife) -> None:
    """Serve and train until the run is done."""
    config = sharded_config(life.folder, life.steps, life.checkpoint_every, life.ray_port)
    runtime = make_runtime(life.folder, config, listen=f"127.0.0.1:{life.port}")
    policy, cluster = policy_config(life.model), None
    if life.ray_port:
        site = ClusterSite(runtime.run_id, runtime.token, "127.0.0.1", life.folder / "logs")
        cluster = RayCluster(site, policy, config.rank, runtime.drain)
    ranks = TrustedRanks(life.folder, policy, config, life.folder / "shm", cluster)
    tracker = JsonlTracker(life.folder / "run" / "metrics.jsonl")
    try:
        given = LearnerDependencies(ranks, tracker, TokenizerDigests(TOKENIZER), cluster=cluster)
        await run_learner(runtime, given)
    finally:
        await ranks.close()
        if cluster is not None:
            await cluster.close()
        tracker.close()


def run_sharded(life: ShardedLife) -> None:
    """Live one life, in the forked process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_process, "python_command", ProcessForge(life.forge).python_command)
        asyncio.run(live_sharded(life))
