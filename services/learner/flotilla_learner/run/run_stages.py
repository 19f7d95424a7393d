"""Stages that every run has, whatever its steps train on: load and replay, publish, evaluate, save,
end."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from flotilla_common.aio.concurrency import run_unless
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.telemetry import trace
from flotilla_common.telemetry.log import get_logger
from flotilla_common.telemetry.watchdog import Watchdog
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.groups.batcher import Batch
from flotilla_learner.journal.schema import Plan
from flotilla_learner.run.eval_report import Moment
from flotilla_learner.run.eval_schedule import EvalSchedule
from flotilla_learner.run.policy_publisher import PolicyPublisher
from flotilla_learner.run.run_clock import Stopwatch
from flotilla_learner.run.status import LearnerStatus, Phase
from flotilla_learner.run.step_trainer import StepTrainer
from flotilla_learner.run.summary import RunSummary
from flotilla_learner.types import ModelInfo

_log = get_logger(__name__)


@dataclass(kw_only=True)
class RunStages:
    """Stages of one learner's run. A stage that returns False was cut short by a drain."""

    config: LearnerConfig
    trainer: StepTrainer
    publisher: PolicyPublisher
    evals: EvalSchedule
    summary: RunSummary
    status: LearnerStatus
    watchdog: Watchdog
    drain: asyncio.Event
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    async def load_and_replay(
        self,
        on_loaded: Callable[[ModelInfo], None],
        replay_step: Callable[[Plan], Awaitable[None]],
    ) -> bool:
        """Load the newest checkpoint and replay the plans that were committed after it.

        A policy on the way whose evaluation is missing is evaluated first, since the run never
        returns to it. `on_loaded` receives what the ranks loaded, before anything is published."""
        await self.evals.load_reports()
        checkpoint = await self.trainer.find_checkpoint()
        with self.watchdog.stage("start ranks"):
            info = await run_unless(self.drain, self.trainer.start_ranks(checkpoint))
        if info is None:
            return False
        await self.trainer.check_weights(info)
        on_loaded(info)
        for plan in await self.trainer.plans_to_replay():
            if not await self._catch_up_eval():
                return False
            await replay_step(plan)
            self.status.update_metrics({}, step=plan.step)
        self.status.update_metrics({}, step=self.trainer.version)
        _log.info("loaded", parameters=info.parameters, step=self.trainer.version)
        self.stopwatch.end_lap()
        return True

    async def _catch_up_eval(self) -> bool:
        """Finish the evaluation of this version that an earlier start began."""
        if self.config.mode == "eval" or not self.is_eval_due:
            return True
        await self.publish_policy(None, train=False)
        await self.begin_eval()
        self.status.enter_phase(Phase.EVALUATING)
        return await run_unless(self.drain, self.evals.wait_until_done()) is not None

    async def publish_policy(self, batch: Batch | None, *, train: bool = True) -> None:
        """Publish the weights of this version; without `train`, only for evaluations."""
        self.status.enter_phase(Phase.PUBLISHING)
        stage = self.watchdog.stage("publish")
        span = trace.span("publish", {"step": self.trainer.version})
        with self.stopwatch.time_stage("publish"), stage, span:
            publication = await self.trainer.write_weights()
        self.status.policy = await self.publisher.publish_policy(publication, batch, train=train)

    @property
    def is_eval_due(self) -> bool:
        """True if the evaluation of this version is configured, and not done yet."""
        return self.evals.is_due(self._eval_moment, self.trainer.version)

    async def begin_eval(self) -> None:
        """Start evaluating the policy that was just published, if that is due."""
        if self.is_eval_due:
            await self.evals.begin_evaluation(self._eval_moment)

    async def wait_for_eval(self) -> bool:
        """Wait for the evaluation of an earlier version: the next one must not be published or
        saved before its end."""
        with self.stopwatch.time_stage("eval_wait"):
            return await self.evals.wait_at_most(self.config.eval.hold_s, self.drain)

    async def save_if_due(self) -> None:
        """Begin the checkpoint of this version, if it has one."""
        if self.trainer.version % self.config.checkpoint.every == 0:
            await self._begin_checkpoint()

    async def finish_saving(self) -> None:
        """Save this version if needed, and wait until its checkpoint counts."""
        if not self.trainer.is_saved:
            await self._begin_checkpoint()
        with self.watchdog.stage("checkpoint"):
            await self.trainer.finish_checkpoint()

    async def finish_run(self) -> bool:
        """Save and evaluate the last version, which must be published if that is due."""
        await self.finish_saving()
        if not await self.evals.wait_at_most(self.config.eval.hold_s, self.drain):
            return await self.stop_early()
        if self.evals.is_due("after", self.trainer.version):
            return await self._evaluate_to_the_end("after")
        return await self._mark_done()

    async def evaluate_only(self) -> bool:
        """Evaluate the run's newest policy on all sets: mode `eval`."""
        if not self.evals.has_sets:
            raise ConfigError("learner.mode is eval, but learner.eval.sets has no set to evaluate")
        return await self._evaluate_to_the_end("eval_only")

    async def stop_early(self, *, save: bool = True) -> bool:
        """Leave a drained run so that it can resume later. Always return False."""
        self.status.enter_phase(Phase.DRAINING)
        await self.evals.cancel_running()
        if save and self.config.mode == "train":
            await self.finish_saving()
        await self.trainer.finish_checkpoint()
        await self._write_summary()
        return False

    async def _begin_checkpoint(self) -> None:
        with self.stopwatch.time_stage("checkpoint"), self.watchdog.stage("checkpoint"):
            await self.trainer.begin_checkpoint()

    async def _evaluate_to_the_end(self, moment: Moment) -> bool:
        await self.evals.begin_evaluation(moment)
        self.status.enter_phase(Phase.EVALUATING)
        if await run_unless(self.drain, self.evals.wait_until_done()) is None:
            return await self.stop_early()
        return await self._mark_done()

    async def _mark_done(self) -> bool:
        await self._write_summary()
        self.status.enter_phase(Phase.DONE)
        return True

    @property
    def _eval_moment(self) -> Moment:
        return "before" if self.trainer.version == 0 else "during"

    async def _write_summary(self) -> None:
        await self.summary.write_summary(self.evals.reports, steps=self.trainer.version)
