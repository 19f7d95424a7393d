"""The result that a run would have had without kills."""

import json
from pathlib import Path
from typing import Any

from flotilla_common.spec.config import parse_config
from flotilla_common.spec.spec import PolicyConfig, parse_shared
from flotilla_common.weights.fingerprint import TokenizerDigests, tokenizer_digest
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.groups.batcher import build_train_batch
from flotilla_learner.imitation.demonstration_set import load_demonstrations, make_batch
from flotilla_learner.imitation.step_schedule import StepSchedule
from flotilla_learner.journal.schema import Plan
from flotilla_learner.journal.store import Journal, open_journal
from flotilla_learner.ranks.local_ranks import LocalRanks
from flotilla_learner.types import TrainBatch
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
            if plan.step <= config.warm_steps:
                await ranks.train_step(_imitated(plan, wish, config))
            else:
                await ranks.train_step(await _sampled(plan, journal))
        await save_ranks(ranks, scratch / "replayed")
    finally:
        await ranks.close()
        await journal.close()
    return scratch / "replayed"


async def _sampled(plan: Plan, journal: Journal) -> TrainBatch:
    attempts = await journal.load_trajectories(plan.attempts)
    return build_train_batch(plan.step, attempts, plan.settings)


def _imitated(plan: Plan, wish: dict[str, Any], config: LearnerConfig) -> TrainBatch:
    shared = parse_shared(wish, where="spec")
    assert config.imitation is not None
    digests = TokenizerDigests(tokenizer_digest(Path(shared.policy.model)))
    trained = load_demonstrations(config.imitation, shared, digests).trained
    schedule = StepSchedule(len(trained), config.imitation.sequences_per_step, shared.seed)
    return make_batch(plan.step, [trained[place] for place in schedule.places_of(plan.step)])
