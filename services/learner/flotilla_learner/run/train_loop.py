"""The run, as a list of named steps.

    start ranks -> replay -> publish -> (evaluate before)
      -> [collect -> (ask teacher) -> commit plan -> train -> publish -> free slots -> checkpoint]
      x steps -> evaluate after -> summary

In mode `eval`: start ranks -> replay -> publish -> evaluate -> summary.

Rollout workers sample all the while; lease slots, which a step frees when its policy is
published, keep them from running ahead. Evaluations run beside training; the next publication
waits for them, so that they see one policy only. A run that imitates has its own loop of steps, in
`learner/imitation/`, over the same stages: `run_stages.py`.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flotilla_common.aio.concurrency import run_unless, running_tasks
from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.telemetry import trace
from flotilla_common.telemetry.log import bind_process
from flotilla_learner.groups.batcher import Batch
from flotilla_learner.groups.dispatcher import GroupDispatcher
from flotilla_learner.guard.mismatch_guard import MismatchGuard, Ruling
from flotilla_learner.journal.schema import Plan
from flotilla_learner.journal.teacher_tables import AttemptScores
from flotilla_learner.run.engine_resync import EngineResync
from flotilla_learner.run.run_stages import RunStages
from flotilla_learner.run.status import Phase
from flotilla_learner.run.step_recorder import StepRecorder
from flotilla_learner.sampling.tasks import Task
from flotilla_learner.teacher.teacher_desk import STAGE, TeacherDesk
from flotilla_learner.types import ModelInfo, StepSettings


@dataclass(frozen=True, kw_only=True)
class TrainLoop:
    """Training loop of one learner; `run_until_done` returns when it is done or drained."""

    stages: RunStages
    dispatcher: GroupDispatcher
    guard: MismatchGuard
    resync: EngineResync
    recorder: StepRecorder
    # Where the run's teacher is asked, if it has one.
    desk: TeacherDesk | None = None
    # All that the run trains on.
    tasks: Sequence[Task] = ()

    async def run_until_done(self, on_loaded: Callable[[ModelInfo], None]) -> bool:
        """Run to the end. Return True if every step and evaluation is done, False if drained
        first.

        `on_loaded` receives what the ranks loaded, before anything is published."""

        def note_loaded(info: ModelInfo) -> None:
            on_loaded(info)
            self.note_model(info)

        if not await self.stages.load_and_replay(note_loaded, self.replay_step):
            return await self.stages.stop_early()
        return await self.run_loaded()

    def note_model(self, info: ModelInfo) -> None:
        """Record what the ranks loaded."""
        self.guard.note_model(info)

    async def run_loaded(self) -> bool:
        """Do what is left after the journaled steps; see `run_until_done`."""
        stages, trainer = self.stages, self.stages.trainer
        await stages.publish_policy(None)
        if stages.config.mode == "eval":
            return await stages.evaluate_only()
        await stages.begin_eval()
        if self.desk is not None and not await self._open_desk(self.desk):
            return await stages.stop_early()
        while trainer.version < stages.config.total_steps:
            batch = await run_unless(stages.drain, self._collect_batch())
            if batch is None:
                return await stages.stop_early()
            ruling = await self._judge_batch(batch)
            if ruling.resync:
                await self.resync.resync_engines(batch, trainer.version)
                continue
            if self.desk is None:
                scores = None
            elif (scores := await self._ask_teacher(self.desk, batch)) is None:
                return await stages.stop_early()
            if not await self._run_step(batch, ruling.settings, scores):
                return await stages.stop_early(save=False)
        return await stages.finish_run()

    # --- steps of a run

    async def replay_step(self, plan: Plan) -> None:
        """Train the step of a plan again."""
        await self.recorder.record_replayed(plan.step, await self.stages.trainer.train_plan(plan))

    async def _collect_batch(self) -> Batch:
        stages = self.stages
        phase = Phase.EVALUATING if stages.evals.is_running else Phase.SAMPLING
        stages.status.enter_phase(phase)
        with stages.stopwatch.time_stage("rollout_wait"), stages.watchdog.stage("collect"):
            return await self.dispatcher.wait_for_batch()

    async def _judge_batch(self, batch: Batch) -> Ruling:
        """Compare a batch with the trainer before it is trained on.

        Raises MismatchError if the run must not start, or must stop after a checkpoint."""
        with self.stages.watchdog.stage("compare"):
            ruling = await self.guard.before_step(batch, self.stages.trainer.version)
        if ruling.stop:
            await self.stages.finish_saving()
            raise ruling.stop
        return ruling

    async def _open_desk(self, desk: TeacherDesk) -> bool:
        """Wait for the teacher; return False if a drain came first. Raises TeacherRefusedError."""

        async def open_desk() -> bool:
            await desk.open(self.tasks)
            return True

        with self.stages.watchdog.stage(STAGE):
            return bool(await run_unless(self.stages.drain, open_desk()))

    async def _ask_teacher(
        self, desk: TeacherDesk, batch: Batch
    ) -> Mapping[AttemptKey, AttemptScores] | None:
        """Have a batch scored, before its plan is committed; return None if a drain came first: the
        next start asks again. Raises TeacherRefusedError."""
        attempts = await self.stages.trainer.load_attempts(batch.attempt_keys)
        tasks = {group.spec.group_id: group.spec.task for group in batch.groups}
        facts = {"attempts": len(attempts)}
        with self.stages.watchdog.stage(STAGE), trace.span("ask teacher", facts):
            return await run_unless(self.stages.drain, desk.score_attempts(attempts, tasks))

    def _work_beside(self) -> list[Coroutine[Any, Any, None]]:
        """Return what is done while a step trains."""
        if self.desk is None:
            return []
        return [self.desk.work_ahead(self._list_waiting, self.stages.trainer.load_attempts)]

    def _list_waiting(self) -> dict[AttemptKey, Task]:
        """Return the attempts of groups that wait for a step, with their tasks."""
        groups = self.dispatcher.batcher.waiting
        return {r.trajectory.key: g.spec.task for g in groups for r in g.graded}

    async def _run_step(
        self,
        batch: Batch,
        settings: StepSettings,
        scores: Mapping[AttemptKey, AttemptScores] | None,
    ) -> bool:
        """Train on a batch and publish the result.

        Return False if a drain came while an evaluation delayed the publication: the plan is
        journaled, and the next start evaluates and then trains again."""
        stages, trainer = self.stages, self.stages.trainer
        base = trainer.version
        bind_process(step=base + 1)
        plan = await trainer.commit_plan(batch, settings, scores)
        stages.status.enter_phase(Phase.TRAINING)
        sync = stages.publisher.sync_seconds
        facts = {"step": plan.step, "attempts": len(plan.attempts)}
        stage = stages.watchdog.stage("train")
        with stages.stopwatch.time_stage("train"), stage, trace.span("train", facts):
            async with running_tasks(*self._work_beside()):
                result = self.guard.with_metrics(await trainer.train_plan(plan), base)
        if not await stages.wait_for_eval():
            return False
        await stages.publish_policy(batch)
        await stages.save_if_due()
        lap = stages.stopwatch.end_lap()
        await self.recorder.record_step(batch, result, lap, sync, base=base)
        await stages.begin_eval()
        return True
