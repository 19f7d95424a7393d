"""The result that a run would have had without kills."""

import json
from pathlib import Path

from services.common.spec.config import parse_config
from services.common.spec.spec import PolicyConfig
from services.learner.config.learner import LearnerConfig
from services.learner.groups.batcher import build_train_batch
from services.learner.journal.store import open_journal
from services.learner.ranks.local_ranks import LocalRanks
from tests.faults.harness import FaultRun
from tests.support.checkpoints import save_ranks


async def replayed(run: FaultRun, scratch: Path) -> Path:
    """The checkpoint of one rank that trains on all journaled plans in one go. Payloads must have
    been kept."""
    wish = json.loads((run.folder / "spec.json").read_text())
    config = parse_config(LearnerConfig, wish["learner"], where="learner")
    policy = parse_config(PolicyConfig, wish["policy"], where="policy")
    journal = open_journal(run.folder)
    shm = scratch / "shm"
    shm.mkdir()
    ranks = LocalRanks("replay", policy, config, scratch / "rank.log", shm)
    try:
        await ranks.start_ranks(None)
        for plan in await journal.plans_after(0):
            await ranks.train_step(
                build_train_batch(
                    plan.step, await journal.load_trajectories(plan.attempts), plan.settings
                )
            )
        await save_ranks(ranks, scratch / "replayed")
    finally:
        await ranks.close()
        await journal.close()
    return scratch / "replayed"
