"""The run of a policy that imitates, as a list of named steps.

    start ranks -> replay -> (publish -> evaluate before)
      -> [commit plan -> train -> checkpoint -> (publish -> evaluate)] x steps
      -> (publish -> evaluate after) -> summary

Nothing is sampled for a step, so that weights are published for evaluations alone. What a step
trains on follows from its number: a start that resumes trains the same again. In a warm start
(`warm_start.py`) these are the first steps of a run that then trains on attempts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flotilla_common.process.runtime import Runtime
from flotilla_common.telemetry import trace
from flotilla_common.telemetry.log import bind_process
from flotilla_learner.config.imitation import ImitationConfig
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.dependencies import LearnerDependencies
from flotilla_learner.imitation.demonstration_set import DemonstrationSet, make_batch
from flotilla_learner.imitation.imitation_recorder import ImitationRecorder
from flotilla_learner.imitation.step_schedule import StepSchedule
from flotilla_learner.journal.schema import Plan
from flotilla_learner.run.assembly import RunState, build_stages, open_record
from flotilla_learner.run.run_record import RunRecord
from flotilla_learner.run.run_stages import RunStages
from flotilla_learner.run.status import Phase
from flotilla_learner.sampling.eval_sets import EvalSet
from flotilla_learner.types import BatchScore, ModelInfo, TrainBatch


@dataclass(frozen=True, kw_only=True)
class ImitationLoop:
    """Training loop of one learner; `run_until_done` returns when it is done or drained. The steps
    up to `last` imitate."""

    stages: RunStages
    config: ImitationConfig
    last: int
    demonstrations: DemonstrationSet
    schedule: StepSchedule
    recorder: ImitationRecorder

    async def run_until_done(self, on_loaded: Callable[[ModelInfo], None]) -> bool:
        """Run to the end. Return True if every step and evaluation is done, False if drained first.

        `on_loaded` receives what the ranks loaded. Raises ConfigError if the demonstrations are
        not of this model."""
        stages, trainer = self.stages, self.stages.trainer

        def check_and_note(info: ModelInfo) -> None:
            self.demonstrations.check_vocabulary(info.vocab_size)
            on_loaded(info)

        if not await stages.load_and_replay(check_and_note, self.replay_step):
            return await stages.stop_early()
        if stages.config.mode == "eval":
            await stages.publish_policy(None, train=False)
            return await stages.evaluate_only()
        if not await self.run_steps():
            return False
        if stages.evals.is_due("after", trainer.version):
            await stages.publish_policy(None, train=False)
        return await stages.finish_run()

    async def run_steps(self) -> bool:
        """Train the steps that are left, up to the last. Return False if the run was drained
        first, and is left so that it can resume."""
        stages, trainer = self.stages, self.stages.trainer
        if trainer.version == 0:
            self.recorder.record_start(await self._score_heldout())
        await self._evaluate_if_due()
        while trainer.version < self.last:
            if stages.drain.is_set():
                return await stages.stop_early()
            if not await self._run_step():
                return await stages.stop_early(save=False)
        return True

    async def _run_step(self) -> bool:
        """Train the next step. Return False if a drain came while an evaluation delayed what
        follows: the next start evaluates first, and then trains the step again."""
        stages = self.stages
        plan = await stages.trainer.commit_imitation()
        bind_process(step=plan.step)
        stages.status.enter_phase(Phase.IMITATING)
        places = self.schedule.places_of(plan.step)
        batch = self._batch_of(plan.step, places)
        stage = stages.watchdog.stage("train")
        facts = {"step": plan.step, "sequences": len(batch.sequences)}
        with stages.stopwatch.time_stage("train"), stage, trace.span("train", facts):
            result = await stages.trainer.train_batch(batch)
        self.recorder.dump_step(plan.step, self.demonstrations, places, result)
        score = await self._score_if_due()
        if not await stages.wait_for_eval():
            return False
        await stages.save_if_due()
        lap = stages.stopwatch.end_lap()
        epochs = self.schedule.epochs_after(plan.step)
        await self.recorder.record_step(batch, epochs, result, score, lap)
        await self._evaluate_if_due()
        return True

    async def replay_step(self, plan: Plan) -> None:
        """Train the step of a plan again."""
        places = self.schedule.places_of(plan.step)
        batch = self._batch_of(plan.step, places)
        result = await self.stages.trainer.train_batch(batch)
        self.recorder.dump_step(plan.step, self.demonstrations, places, result)
        known = plan.step <= self.recorder.logged_step
        score = None if known else await self._score_if_due()
        epochs = self.schedule.epochs_after(plan.step)
        await self.recorder.record_step(batch, epochs, result, score, None)

    def _batch_of(self, step: int, places: Sequence[int]) -> TrainBatch:
        return make_batch(step, [self.demonstrations.trained[place] for place in places])

    async def _evaluate_if_due(self) -> None:
        """Publish this version and start evaluating it, if that is due. The last one is left to
        what follows the steps."""
        if self.stages.trainer.version < self.last and self.stages.is_eval_due:
            await self.stages.publish_policy(None, train=False)
            await self.stages.begin_eval()

    async def _score_if_due(self) -> BatchScore | None:
        step = self.stages.trainer.version
        due = step % self.config.heldout_every == 0 or step == self.last
        return await self._score_heldout() if due else None

    async def _score_heldout(self) -> BatchScore | None:
        """Score what is held out under this version, in portions of a step's size; None if nothing
        is."""
        stages, held = self.stages, self.demonstrations.heldout
        if not held:
            return None
        size, tokens, loss = self.config.sequences_per_step, 0, 0.0
        with stages.stopwatch.time_stage("score"), stages.watchdog.stage("score"):
            for start in range(0, len(held), size):
                batch = make_batch(stages.trainer.version, held[start : start + size])
                found = await stages.trainer.score_batch(batch)
                tokens += found.tokens
                loss += found.loss * found.tokens
        return BatchScore(tokens, loss / tokens)


async def build_imitation_loop(
    runtime: Runtime[LearnerConfig],
    vendors: LearnerDependencies,
    state: RunState,
    eval_sets: Sequence[EvalSet],
    demonstrations: DemonstrationSet,
) -> ImitationLoop:
    """Build the loop of a run that imitates."""
    record = await open_record(runtime, vendors, state, eval_sets)
    stages = build_stages(runtime, vendors, state, eval_sets, record)
    return make_imitation_loop(runtime, stages, record, demonstrations)


def make_imitation_loop(
    runtime: Runtime[LearnerConfig],
    stages: RunStages,
    record: RunRecord,
    demonstrations: DemonstrationSet,
) -> ImitationLoop:
    """Make the loop of the steps of a run that imitate: those of its warm start, or all."""
    config = runtime.config.imitation
    assert config is not None, "it has demonstrations"
    sequences = len(demonstrations.trained)
    return ImitationLoop(
        stages=stages,
        config=config,
        last=runtime.config.warm_steps or runtime.config.steps,
        demonstrations=demonstrations,
        schedule=StepSchedule(sequences, config.sequences_per_step, runtime.shared.seed),
        recorder=ImitationRecorder(record),
    )
