"""Training of a run's steps on its ranks: from the newest checkpoint, by journaled plans."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.run_folder.journal_file import JournalError
from flotilla_learner.checkpoints.checkpoint_folders import Checkpoints
from flotilla_learner.groups.batcher import Batch, build_train_batch
from flotilla_learner.groups.dispatcher import GroupDispatcher
from flotilla_learner.journal.schema import CheckpointRow, Plan
from flotilla_learner.journal.store import Journal
from flotilla_learner.journal.teacher_tables import AttemptScores
from flotilla_learner.ports import Ranks
from flotilla_learner.run.resume_checks import (
    check_base_is_the_same,
    check_weights_are_the_same,
)
from flotilla_learner.types import (
    BatchScore,
    ModelInfo,
    Publication,
    StepResult,
    StepSettings,
    TrainBatch,
)


class ReplayError(ConfigError):
    """Something that a replay needs is gone; the message names it. Another start cannot help."""


class StepTrainer:
    """Trains steps, each by a plan that is journaled first, and saves the ranks' state.

    `version` is the number of optimizer steps behind the ranks' weights."""

    def __init__(
        self, ranks: Ranks, checkpoints: Checkpoints, journal: Journal, dispatcher: GroupDispatcher
    ) -> None:
        self.version = 0
        self._saved_step = 0
        self._ranks = ranks
        self._checkpoints = checkpoints
        self._journal = journal
        self._dispatcher = dispatcher

    async def find_checkpoint(self) -> CheckpointRow | None:
        """Return the newest intact checkpoint, if there is one."""
        return await self._checkpoints.find_newest()

    async def start_ranks(self, checkpoint: CheckpointRow | None) -> ModelInfo:
        """Start the ranks, from a checkpoint or from the model."""
        folder = Path(checkpoint.directory) if checkpoint else None
        info = await self._ranks.start_ranks(folder)
        self.version = self._saved_step = checkpoint.step if checkpoint else 0
        return info

    async def check_weights(self, info: ModelInfo) -> None:
        """Raise ConfigError if the model is not the one that the run started with."""
        lineage = self._dispatcher.lineage
        if not lineage.fingerprints_of(0):
            await check_base_is_the_same(self._journal, info)
        await check_weights_are_the_same(lineage, self._ranks, info)

    async def plans_to_replay(self) -> list[Plan]:
        """Return the plans that were committed after the checkpoint, in order.

        Raises ReplayError when one is missing."""
        plans = await self._journal.plans_after(self.version)
        for step, plan in enumerate(plans, self.version + 1):
            if plan.step != step:
                raise ReplayError(f"the journal has no plan for step {step}")
        return plans

    async def load_attempts(self, keys: Sequence[AttemptKey]) -> list[Trajectory]:
        """Load attempts, except those of groups with damaged records."""
        return await self._journal.load_intact(keys)

    async def commit_plan(
        self,
        batch: Batch,
        settings: StepSettings,
        scores: Mapping[AttemptKey, AttemptScores] | None = None,
    ) -> Plan:
        """Journal the plan of the next step, with what its groups taught the curriculum, and what a
        teacher says about them."""
        settings = replace(settings, taught=scores is not None)
        plan = Plan(self.version + 1, batch.attempt_keys, settings)
        groups = [group.spec.group_id for group in batch.groups]
        filtered = [group.spec.group_id for group in batch.filtered]
        snapshot = self._dispatcher.learn_from_batch(plan.step, batch)
        epoch = self._dispatcher.run_epoch
        await self._journal.commit_plan(plan, epoch, groups, filtered, snapshot, scores)
        self._dispatcher.mark_journaled(snapshot)
        return plan

    async def commit_imitation(self) -> Plan:
        """Journal that the next step follows; what it imitates is a function of its number."""
        plan = Plan(self.version + 1, ())
        await self._journal.commit_plan(plan, self._dispatcher.run_epoch, (), ())
        return plan

    async def train_plan(self, plan: Plan) -> StepResult:
        """Train the step of a plan. Raises ReplayError if its trajectories are gone, or a teacher's
        scores of them."""
        attempts = await self._journal.load_intact(plan.attempts)
        if not attempts:
            raise ReplayError(
                f"every trajectory of step {plan.step} differs from what was journaled: restore the"
                " journal from a copy, or start a new run"
            )
        if any(not attempt.sequences for attempt in attempts):
            raise ReplayError(
                f"the trajectories of step {plan.step} were pruned, and no checkpoint after it"
                " can be read: restore a folder under checkpoints/, or start a new run"
            )
        try:
            keys = [attempt.key for attempt in attempts]
            scores = await self._journal.load_scores(keys) if plan.settings.taught else None
        except JournalError as error:
            raise ReplayError(str(error)) from error
        return await self.train_batch(build_train_batch(plan.step, attempts, plan.settings, scores))

    async def train_batch(self, batch: TrainBatch) -> StepResult:
        """Train the next step on a batch."""
        result = await self._ranks.train_step(batch)
        self.version = batch.step
        return result

    async def score_batch(self, batch: TrainBatch) -> BatchScore:
        """Score the policy tokens of a batch under the weights of this version."""
        return await self._ranks.score_batch(batch)

    async def write_weights(self) -> Publication:
        """Write the weights of this version, ready to be announced."""
        return await self._ranks.publish_weights(self.version)

    async def begin_checkpoint(self) -> None:
        """Copy the ranks' state; it becomes the checkpoint of this version beside training."""
        await self._checkpoints.begin_save(self._ranks, self.version)
        self._saved_step = self.version

    async def finish_checkpoint(self) -> None:
        """Wait until the last checkpoint that was started, if any, is the newest."""
        await self._checkpoints.finish_save()

    @property
    def is_saved(self) -> bool:
        """True if the newest checkpoint is of this version, or will be."""
        return self._saved_step >= self.version
