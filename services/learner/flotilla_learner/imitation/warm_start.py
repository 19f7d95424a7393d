"""The run of a policy that first imitates and then learns from attempts, as a list of named steps.

    start ranks -> replay -> (publish -> evaluate before)
      -> [commit plan -> train -> checkpoint] x warm steps -> publish -> (evaluate)
      -> [collect -> commit plan -> train -> publish -> free slots -> checkpoint] x steps
      -> evaluate after -> summary

Both loops number their steps in one row, so that journal, checkpoints and versions are those of one
run. The switch is no state of its own: whether a step imitates, and that the optimizer begins anew
before the first that does not, follow from the step's number."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flotilla_common.process.runtime import Runtime
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.dependencies import LearnerDependencies
from flotilla_learner.imitation.demonstration_set import DemonstrationSet
from flotilla_learner.imitation.imitation_loop import ImitationLoop, make_imitation_loop
from flotilla_learner.journal.schema import Plan
from flotilla_learner.run.assembly import RunState, build_stages, make_train_loop, open_record
from flotilla_learner.run.train_loop import TrainLoop
from flotilla_learner.sampling.eval_sets import EvalSet
from flotilla_learner.sampling.tasks import Task
from flotilla_learner.types import ModelInfo


@dataclass(frozen=True, slots=True)
class WarmStartLoop:
    """Training loop of one learner; `run_until_done` returns when it is done or drained."""

    imitation: ImitationLoop
    training: TrainLoop

    async def run_until_done(self, on_loaded: Callable[[ModelInfo], None]) -> bool:
        """Run to the end. Return True if every step and evaluation is done, False if drained first.

        `on_loaded` receives what the ranks loaded. Raises ConfigError if the demonstrations are
        not of this model."""
        stages = self.training.stages

        def check_and_note(info: ModelInfo) -> None:
            self.imitation.demonstrations.check_vocabulary(info.vocab_size)
            on_loaded(info)
            self.training.note_model(info)

        if not await stages.load_and_replay(check_and_note, self._replay_step):
            return await stages.stop_early()
        warm = stages.trainer.version >= self.imitation.last
        if stages.config.mode == "train" and not warm and not await self.imitation.run_steps():
            return False
        stages.status.drop_metrics("sft/")
        return await self.training.run_loaded()

    async def _replay_step(self, plan: Plan) -> None:
        loop = self.imitation if plan.step <= self.imitation.last else self.training
        await loop.replay_step(plan)


async def build_warm_start_loop(
    runtime: Runtime[LearnerConfig],
    vendors: LearnerDependencies,
    state: RunState,
    eval_sets: Sequence[EvalSet],
    tasks: Sequence[Task],
    demonstrations: DemonstrationSet,
) -> WarmStartLoop:
    """Build the loop of a run with a warm start."""
    record = await open_record(runtime, vendors, state, eval_sets)
    stages = build_stages(runtime, vendors, state, eval_sets, record)
    return WarmStartLoop(
        make_imitation_loop(runtime, stages, record, demonstrations),
        make_train_loop(runtime, vendors, state, stages, record, tasks),
    )
