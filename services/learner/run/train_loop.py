"""The run, as a list of named steps.

    start ranks -> replay -> publish -> (evaluate before)
      -> [collect -> commit plan -> train -> publish -> free slots -> checkpoint] x steps
      -> evaluate after -> summary

In mode `eval`: start ranks -> replay -> publish -> evaluate -> summary.

Rollout workers sample all the while; lease slots, which a step frees when its policy is
published, keep them from running ahead. Evaluations run beside training; the next publication
waits for them, so that they see one policy only.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from services.common.aio.concurrency import run_unless
from services.common.rpc.errors import ConfigError
from services.common.telemetry import trace
from services.common.telemetry.log import bind_process, get_logger
from services.common.telemetry.watchdog import Watchdog
from services.learner.config.learner import CheckpointConfig, LearnerConfig
from services.learner.groups.batcher import Batch
from services.learner.groups.dispatcher import GroupDispatcher
from services.learner.guard.mismatch_guard import MismatchGuard, Ruling
from services.learner.run.engine_resync import EngineResync
from services.learner.run.eval_report import Moment
from services.learner.run.eval_schedule import EvalSchedule
from services.learner.run.policy_publisher import PolicyPublisher
from services.learner.run.run_clock import Stopwatch
from services.learner.run.status import LearnerStatus, Phase
from services.learner.run.step_recorder import StepRecorder
from services.learner.run.step_trainer import StepTrainer
from services.learner.run.summary import RunSummary
from services.learner.types import ModelInfo, StepSettings

_log = get_logger(__name__)


@dataclass(kw_only=True)
class TrainLoop:
    """Training loop of one learner; `run_until_done` returns when it is done or drained."""

    config: LearnerConfig
    dispatcher: GroupDispatcher
    trainer: StepTrainer
    publisher: PolicyPublisher
    guard: MismatchGuard
    resync: EngineResync
    evals: EvalSchedule
    recorder: StepRecorder
    summary: RunSummary
    status: LearnerStatus
    watchdog: Watchdog
    drain: asyncio.Event

    def __post_init__(self) -> None:
        self._stopwatch = Stopwatch()

    async def run_until_done(self, on_loaded: Callable[[ModelInfo], None]) -> bool:
        """Run to the end. Return True if every step and evaluation is done, False if drained
        first.

        `on_loaded` receives what the ranks loaded, before anything is published."""
        if not await self._load_and_replay(on_loaded):
            return await self._stop_early()
        await self._publish_policy(None)
        if self.config.mode == "eval":
            return await self._evaluate_only()
        await self._begin_eval()
        while self.trainer.version < self.config.steps:
            batch = await run_unless(self.drain, self._collect_batch())
            if batch is None:
                return await self._stop_early()
            ruling = await self._judge_batch(batch)
            if ruling.resync:
                await self.resync.resync_engines(batch, self.trainer.version)
            elif not await self._run_step(batch, ruling.settings):
                return await self._stop_early(save=False)
        return await self._finish_run()

    # --- steps of a run

    async def _load_and_replay(self, on_loaded: Callable[[ModelInfo], None]) -> bool:
        """Load the newest checkpoint and replay the plans that were committed after it.

        A policy on the way whose evaluation is missing is evaluated first, since the run never
        returns to it. Return False if a drain came before the end."""
        await self.evals.load_reports()
        checkpoint = await self.trainer.find_checkpoint()
        with self.watchdog.stage("start ranks"):
            info = await run_unless(self.drain, self.trainer.start_ranks(checkpoint))
        if info is None:
            return False
        await self.trainer.check_weights(info)
        on_loaded(info)
        self.guard.note_model(info)
        for plan in await self.trainer.plans_to_replay():
            if not await self._catch_up_eval():
                return False
            await self.recorder.record_replayed(plan.step, await self.trainer.train_plan(plan))
            self.status.update_metrics({}, step=plan.step)
        self.status.update_metrics({}, step=self.trainer.version)
        _log.info("loaded", parameters=info.parameters, step=self.trainer.version)
        self._stopwatch.end_lap()
        return True

    async def _catch_up_eval(self) -> bool:
        """Finish the evaluation of this version that an earlier start began.

        Return False if drained."""
        if self.config.mode == "eval" or not self.evals.is_due(
            self._eval_moment, self.trainer.version
        ):
            return True
        await self._publish_policy(None, train=False)
        await self._begin_eval()
        self.status.enter_phase(Phase.EVALUATING)
        return await run_unless(self.drain, self.evals.wait_until_done()) is not None

    async def _collect_batch(self) -> Batch:
        phase = Phase.EVALUATING if self.evals.is_running else Phase.SAMPLING
        self.status.enter_phase(phase)
        with self._stopwatch.time_stage("rollout_wait"), self.watchdog.stage("collect"):
            return await self.dispatcher.wait_for_batch()

    async def _judge_batch(self, batch: Batch) -> Ruling:
        """Compare a batch with the trainer before it is trained on.

        Raises MismatchError if the run must not start, or must stop after a checkpoint."""
        with self.watchdog.stage("compare"):
            ruling = await self.guard.before_step(batch, self.trainer.version)
        if ruling.stop:
            await self._finish_saving()
            raise ruling.stop
        return ruling

    async def _run_step(self, batch: Batch, settings: StepSettings) -> bool:
        """Train on a batch and publish the result.

        Return False if a drain came while an evaluation delayed the publication: the plan is
        journaled, and the next start evaluates and then trains again."""
        base = self.trainer.version
        bind_process(step=base + 1)
        plan = await self.trainer.commit_plan(batch, settings)
        self.status.enter_phase(Phase.TRAINING)
        sync = self.publisher.sync_seconds
        facts = {"step": plan.step, "attempts": len(plan.attempts)}
        stage = self.watchdog.stage("train")
        with self._stopwatch.time_stage("train"), stage, trace.span("train", facts):
            result = self.guard.with_metrics(await self.trainer.train_plan(plan), base)
        with self._stopwatch.time_stage("eval_wait"):
            if not await self.evals.wait_at_most(self.config.eval.hold_s, self.drain):
                return False
        await self._publish_policy(batch)
        if is_checkpoint_due(self.trainer.version, self.config.checkpoint):
            await self._begin_checkpoint()
        lap = self._stopwatch.end_lap()
        await self.recorder.record_step(batch, result, lap, sync, base=base)
        await self._begin_eval()
        return True

    async def _publish_policy(self, batch: Batch | None, *, train: bool = True) -> None:
        """Publish the weights of this version; without `train`, only for evaluations."""
        self.status.enter_phase(Phase.PUBLISHING)
        stage = self.watchdog.stage("publish")
        span = trace.span("publish", {"step": self.trainer.version})
        with self._stopwatch.time_stage("publish"), stage, span:
            publication = await self.trainer.write_weights()
        self.status.policy = await self.publisher.publish_policy(publication, batch, train=train)

    async def _begin_checkpoint(self) -> None:
        with self._stopwatch.time_stage("checkpoint"), self.watchdog.stage("checkpoint"):
            await self.trainer.begin_checkpoint()

    async def _finish_saving(self) -> None:
        """Save this version if needed, and wait until its checkpoint counts."""
        if not self.trainer.is_saved:
            await self._begin_checkpoint()
        with self.watchdog.stage("checkpoint"):
            await self.trainer.finish_checkpoint()

    async def _finish_run(self) -> bool:
        await self._finish_saving()
        if not await self.evals.wait_at_most(self.config.eval.hold_s, self.drain):
            return await self._stop_early()
        if self.evals.is_due("after", self.trainer.version):
            return await self._evaluate_to_the_end("after")
        return await self._mark_done()

    async def _evaluate_only(self) -> bool:
        """Evaluate the run's newest policy on all sets: mode `eval`."""
        if not self.evals.has_sets:
            raise ConfigError("learner.mode is eval, but learner.eval.sets has no set to evaluate")
        return await self._evaluate_to_the_end("eval_only")

    async def _evaluate_to_the_end(self, moment: Moment) -> bool:
        await self.evals.begin_evaluation(moment)
        self.status.enter_phase(Phase.EVALUATING)
        if await run_unless(self.drain, self.evals.wait_until_done()) is None:
            return await self._stop_early()
        return await self._mark_done()

    async def _mark_done(self) -> bool:
        await self._write_summary()
        self.status.enter_phase(Phase.DONE)
        return True

    async def _stop_early(self, *, save: bool = True) -> bool:
        """Leave a drained run so that it can resume later."""
        self.status.enter_phase(Phase.DRAINING)
        await self.evals.cancel_running()
        if save and self.config.mode == "train":
            await self._finish_saving()
        await self.trainer.finish_checkpoint()
        await self._write_summary()
        return False

    async def _begin_eval(self) -> None:
        """Start evaluating the policy that was just published, if that is due."""
        if self.evals.is_due(self._eval_moment, self.trainer.version):
            await self.evals.begin_evaluation(self._eval_moment)

    @property
    def _eval_moment(self) -> Moment:
        return "before" if self.trainer.version == 0 else "during"

    async def _write_summary(self) -> None:
        await self.summary.write_summary(self.evals.reports, steps=self.trainer.version)


def is_checkpoint_due(version: int, config: CheckpointConfig) -> bool:
    return config.every > 0 and version > 0 and version % config.every == 0
