"""Assembly of a run: the state that its API and its loop share, and the loop itself."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from flotilla_common.process.runtime import Runtime
from flotilla_common.rpc.errors import ConfigError
from flotilla_learner.alarms.alarms import Alarms
from flotilla_learner.checkpoints.checkpoint_folders import Checkpoints
from flotilla_learner.checkpoints.uploads import CheckpointUploads
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.dependencies import LearnerDependencies
from flotilla_learner.groups.dispatcher import GroupDispatcher
from flotilla_learner.guard.mismatch_guard import MismatchGuard, load_guard
from flotilla_learner.guard.mismatch_limits import bound_of
from flotilla_learner.journal.store import Journal
from flotilla_learner.judge.judge_desk import JudgeDesk
from flotilla_learner.run.engine_resync import EngineResync
from flotilla_learner.run.eval_schedule import EvalSchedule
from flotilla_learner.run.policy_publisher import PolicyPublisher
from flotilla_learner.run.remaining_time import RemainingTime, plan_of
from flotilla_learner.run.result_sinks import ResultSinks
from flotilla_learner.run.run_clock import load_clock
from flotilla_learner.run.run_record import RunRecord, load_alarm_memory, load_tracked_run
from flotilla_learner.run.run_stages import RunStages
from flotilla_learner.run.status import LearnerStatus
from flotilla_learner.run.step_recorder import StepRecorder
from flotilla_learner.run.step_trainer import StepTrainer
from flotilla_learner.run.summary import RunSummary
from flotilla_learner.run.train_loop import TrainLoop
from flotilla_learner.sampling.eval_sets import EvalSet
from flotilla_learner.sampling.tasks import Task
from flotilla_learner.teacher.teacher_desk import STAGE, TeacherDesk
from flotilla_learner.weights.weight_broadcast import WeightBroadcast


@dataclass(frozen=True, slots=True)
class RunState:
    """State that a run's API and its loop share."""

    journal: Journal
    dispatcher: GroupDispatcher
    broadcast: WeightBroadcast
    guard: MismatchGuard
    alarms: Alarms
    status: LearnerStatus
    checkpoints: Checkpoints
    uploads: CheckpointUploads
    # Where the run's judge is asked, if it has one.
    judges: JudgeDesk | None = None


async def build_run_state(
    runtime: Runtime[LearnerConfig],
    vendors: LearnerDependencies,
    journal: Journal,
    dispatcher: GroupDispatcher,
    uploads: CheckpointUploads,
) -> RunState:
    """Build the state, restored from the journal of earlier starts."""
    config, policy = runtime.config, runtime.shared.policy
    broadcast = WeightBroadcast(
        canary_tolerance=bound_of(config.guard, policy.dtype).tail,
        attach_grace_s=config.attach_grace_s,
        can_send=None if vendors.sender is None else vendors.sender.can_send,
    )
    epoch = dispatcher.run_epoch
    guard = await load_guard(config, policy, vendors.ranks, journal, runtime.run_dir, epoch)
    alarms = await _build_alarms(runtime, vendors, journal)
    status = LearnerStatus(total_steps=config.total_steps, flags=lambda: alarms.metrics)
    checkpoints = Checkpoints(
        runtime.run_dir,
        journal,
        uploads,
        run_id=runtime.run_id,
        run_epoch=epoch,
        keep=config.checkpoint.keep,
    )
    judges = await _open_judges(runtime.config, vendors, journal, dispatcher, alarms)
    parts = (broadcast, guard, alarms, status, checkpoints, uploads)
    return RunState(journal, dispatcher, *parts, judges)


async def open_record(
    runtime: Runtime[LearnerConfig],
    vendors: LearnerDependencies,
    state: RunState,
    eval_sets: Sequence[EvalSet],
) -> RunRecord:
    """Open the trackers, and report where the run is shown; return what its steps are recorded
    with."""
    journal, dumps = state.journal, vendors.dumps
    tracked = await load_tracked_run(journal)
    dumps.hold_in(journal.holds)
    state.status.tracker_url = await asyncio.to_thread(vendors.tracker.open_run, tracked) or ""
    return RunRecord(
        journal=journal,
        sinks=ResultSinks(vendors.tracker, state.alarms, state.status),
        clock=await load_clock(journal),
        dumps=dumps,
        remaining=RemainingTime(plan_of(runtime.config, eval_sets)),
        checkpoint_metrics=state.checkpoints.metrics,
        launcher_metrics=lambda: runtime.launcher_metrics,
        tracked=tracked,
    )


def build_stages(
    runtime: Runtime[LearnerConfig],
    vendors: LearnerDependencies,
    state: RunState,
    eval_sets: Sequence[EvalSet],
    record: RunRecord,
) -> RunStages:
    """Build the stages that every run has."""
    config, journal, dispatcher = runtime.config, state.journal, state.dispatcher
    return RunStages(
        config=config,
        trainer=StepTrainer(vendors.ranks, state.checkpoints, journal, dispatcher),
        publisher=PolicyPublisher(
            config, dispatcher, state.broadcast, state.guard, journal, vendors.publication_servers
        ),
        evals=EvalSchedule(
            *(config, eval_sets, dispatcher, journal, record.sinks, record.dumps),
            runtime.watchdog,
        ),
        summary=RunSummary(runtime.run_dir, runtime.shared.seed, record.clock, journal),
        status=state.status,
        watchdog=runtime.watchdog,
        drain=runtime.drain,
    )


def make_train_loop(
    runtime: Runtime[LearnerConfig],
    vendors: LearnerDependencies,
    state: RunState,
    stages: RunStages,
    record: RunRecord,
    tasks: Sequence[Task],
) -> TrainLoop:
    """Make the loop of steps that train on groups of attempts."""
    config, dispatcher = runtime.config, state.dispatcher
    desk = _open_desk(runtime, vendors, state)
    if desk is not None:
        record.teacher_metrics = desk.take_metrics
    if state.judges is not None:
        record.judge_metrics = state.judges.take_metrics
    return TrainLoop(
        stages=stages,
        dispatcher=dispatcher,
        guard=state.guard,
        resync=EngineResync(dispatcher, state.broadcast, config.max_staleness),
        recorder=StepRecorder(dispatcher, record, tinker_names=config.engine == "tinker"),
        desk=desk,
        tasks=tasks,
    )


def _open_desk(
    runtime: Runtime[LearnerConfig], vendors: LearnerDependencies, state: RunState
) -> TeacherDesk | None:
    """Return the desk at which the run's teacher is asked, if it has one."""
    teacher, config = vendors.teacher, runtime.config.teacher
    if teacher is None or config is None:
        return None
    return TeacherDesk(
        teacher,
        config,
        vendors.hints,
        note_progress=lambda: runtime.watchdog.note_progress(STAGE),
        apply_verdict=lambda verdict: state.alarms.apply_verdicts([verdict]),
    )


async def _open_judges(
    config: LearnerConfig,
    vendors: LearnerDependencies,
    journal: Journal,
    dispatcher: GroupDispatcher,
    alarms: Alarms,
) -> JudgeDesk | None:
    """Return the desk at which the run's judge is asked, if it has one. Raises ConfigError if
    groups await a verdict and it has none."""
    waiting = dispatcher.endings.unjudged
    if config.judge is None or vendors.judge is None:
        if not waiting.empty():
            raise ConfigError(
                f"learner.judge: {waiting.qsize()} groups of earlier starts await a verdict, and"
                " nobody judges; add the table again"
            )
        return None
    return JudgeDesk(
        *(vendors.judge, config.judge, journal, dispatcher.endings),
        calls_before=await journal.count_judge_calls(),
        apply_verdict=lambda verdict: alarms.apply_verdicts([verdict]),
    )


async def _build_alarms(
    runtime: Runtime[LearnerConfig], vendors: LearnerDependencies, journal: Journal
) -> Alarms:
    """Build the alarms, which also report stalls and damage, including earlier damage."""
    config = runtime.config
    alarms = Alarms(
        config.alarms,
        vendors.alarm_sinks,
        max_staleness=config.max_staleness,
        remembered=await load_alarm_memory(journal),
    )
    alarms.on_change = runtime.hurry_heartbeat
    runtime.watchdog.on_standstill = alarms.report_standstill
    for incident in journal.incidents.newest:
        alarms.report_damage(incident)
    journal.incidents.on_report = alarms.report_damage
    return alarms
