"""Composition root: build a learner from its dependencies, and run it."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import grpc.aio

from flotilla_common.aio.concurrency import running_tasks, wait_beside
from flotilla_common.process.run_membership import RaisedAlarm, ReplicaStatus
from flotilla_common.process.runtime import Runtime
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.run_folder.journal_file import JournalError
from flotilla_common.run_folder.metric_lines import ALARMS_FILE, METRICS_FILE
from flotilla_learner.api.group_service import GroupService
from flotilla_learner.api.policy_service import PolicyService
from flotilla_learner.api.sequence_decode import TokenLimits
from flotilla_learner.api.server import build_server
from flotilla_learner.checkpoints import remote_claim
from flotilla_learner.checkpoints.export import export_newest
from flotilla_learner.checkpoints.remote_target import remote_target_of
from flotilla_learner.checkpoints.remote_upload import Identity
from flotilla_learner.config.judge import check_judged_tasks, judged_environments
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.dependencies import LearnerDependencies
from flotilla_learner.groups.dispatcher_start import start_dispatcher
from flotilla_learner.imitation.demonstration_set import (
    DemonstrationSet,
    load_demonstrations,
    refuse_imitated_tasks,
)
from flotilla_learner.imitation.imitation_loop import ImitationLoop, build_imitation_loop
from flotilla_learner.imitation.warm_start import WarmStartLoop, build_warm_start_loop
from flotilla_learner.journal.store import Journal, open_journal
from flotilla_learner.ranks.cluster import dismissed_at_end
from flotilla_learner.run.assembly import (
    RunState,
    build_run_state,
    build_stages,
    make_train_loop,
    open_record,
)
from flotilla_learner.run.prometheus import make_metrics_exporter
from flotilla_learner.run.resume_checks import (
    check_data_are_the_same,
    check_demonstrations_are_the_same,
    check_engine_is_the_same,
    check_eval_sets_are_the_same,
    check_publications_are_alike,
    check_tasks_are_the_same,
    check_tokenizer_is_the_same,
    note_writer,
    report_damaged_alarms,
    report_lost_metrics,
)
from flotilla_learner.run.status import Phase
from flotilla_learner.run.task_files import load_task_files
from flotilla_learner.run.train_loop import TrainLoop
from flotilla_learner.sampling.eval_sets import EvalSet
from flotilla_learner.sampling.tasks import Task
from flotilla_learner.types import ModelInfo

# Alarms that one heartbeat carries.
_MAX_ALARMS = 64


async def run_learner(runtime: Runtime[LearnerConfig], vendors: LearnerDependencies) -> None:
    """Serve and train until the run is done or drained."""
    config = runtime.config
    shared = runtime.shared
    sees_pictures = shared.policy.vision is not None
    tasks, eval_sets = load_task_files(config, shared.seed, sees_pictures=sees_pictures)
    check_judged_tasks(
        config,
        judged_environments(runtime.spec),
        [task.env_key for task in tasks],
        {each.config.name: [task.env_key for task in each.tasks] for each in eval_sets},
    )
    try:
        journal = await asyncio.to_thread(open_journal, runtime.run_dir, runtime.run_id)
    except JournalError as error:
        raise ConfigError(str(error)) from error
    try:
        journal.holds.keep_all = config.journal.keep_payloads
        await note_writer(journal)
        await report_damaged_alarms(journal, runtime.run_dir / ALARMS_FILE)
        if "jsonl" in config.tracking.backends:
            await report_lost_metrics(journal, runtime.run_dir / METRICS_FILE)
        await check_tokenizer_is_the_same(journal, vendors.tokenizer)
        await check_engine_is_the_same(journal, config.engine)
        await check_publications_are_alike(journal, runtime.shared.policy)
        if config.mode == "train" and config.objective == "rl":
            await check_tasks_are_the_same(journal, tasks, config, runtime.shared.seed)
        await check_data_are_the_same(journal, config.data)
        await check_eval_sets_are_the_same(journal, eval_sets)
        demonstrations = await _find_demonstrations(runtime, vendors, journal, eval_sets)
        target = remote_target_of(vendors.store, runtime)
        await remote_claim.check_claims(target, journal, runtime.run_id)
        dispatcher = await start_dispatcher(config, journal, tasks, runtime.shared.seed)
        identity = Identity(runtime.run_id, dispatcher.run_epoch, runtime.incarnation)
        uploads = await remote_claim.claim_epoch(target, journal, identity)
        try:
            state = await build_run_state(runtime, vendors, journal, dispatcher, uploads)
            parts = (runtime, vendors, state, eval_sets)
            done = await _serve_and_train(*parts, tasks, demonstrations)
            if done and config.mode == "train":
                await export_newest(journal, runtime.run_dir, vendors.export)
            await vendors.dumps.finish()
            await uploads.finish(config.checkpoint.remote_exit_s)
        finally:
            uploads.close()
    finally:
        await journal.close()


async def _find_demonstrations(
    runtime: Runtime[LearnerConfig],
    vendors: LearnerDependencies,
    journal: Journal,
    eval_sets: Sequence[EvalSet],
) -> DemonstrationSet | None:
    """Load what the run imitates; None if it does not. Raises ConfigError."""
    config = runtime.config.imitation
    if config is None:
        await check_demonstrations_are_the_same(journal, {})
        return None
    shared, tokenizer = runtime.shared, vendors.tokenizer
    found = await asyncio.to_thread(load_demonstrations, config, shared, tokenizer)
    if runtime.config.mode == "train":
        refuse_imitated_tasks(found.trained, eval_sets)
    await check_demonstrations_are_the_same(journal, found.origin)
    return found


async def _serve_and_train(
    runtime: Runtime[LearnerConfig],
    vendors: LearnerDependencies,
    state: RunState,
    eval_sets: Sequence[EvalSet],
    tasks: Sequence[Task],
    demonstrations: DemonstrationSet | None,
) -> bool:
    """Serve, and train on tasks, demonstrations or both. Return True when the run is done, False
    when it was drained first."""
    runtime.watchdog.limit_s = runtime.config.stall_s
    limits: asyncio.Future[TokenLimits] = asyncio.get_running_loop().create_future()

    loop = await _build_loop(runtime, vendors, state, eval_sets, tasks, demonstrations)
    async with runtime.serving(_build_server(runtime, vendors, state, limits)) as serving:

        def accept_calls(info: ModelInfo) -> None:
            runtime.config.check_vocabulary(info.vocab_size)
            longest = runtime.shared.policy.max_model_len
            limits.set_result(TokenLimits(info.vocab_size, longest, info.experts, vendors.vision))
            serving.set_serving(True)

        runtime.report_status(partial(_heartbeat_status, state, limits))
        await runtime.announce(serving.address)
        epoch = state.dispatcher.run_epoch
        runtime.log.info("serving", address=serving.address, run_epoch=epoch)
        try:
            async with dismissed_at_end(vendors.cluster):
                return await _run_with_helpers(loop.run_until_done(accept_calls), state, runtime)
        finally:
            serving.set_serving(False)
            # Calls that still wait would delay the server's shutdown.
            await state.dispatcher.stop_leasing()
            state.broadcast.close()
            await state.checkpoints.close()


async def _build_loop(
    runtime: Runtime[LearnerConfig],
    vendors: LearnerDependencies,
    state: RunState,
    eval_sets: Sequence[EvalSet],
    tasks: Sequence[Task],
    demonstrations: DemonstrationSet | None,
) -> TrainLoop | ImitationLoop | WarmStartLoop:
    parts = (runtime, vendors, state, eval_sets)
    if demonstrations is None:
        record = await open_record(*parts)
        stages = build_stages(*parts, record)
        return make_train_loop(runtime, vendors, state, stages, record, tasks)
    if runtime.config.objective == "rl":
        return await build_warm_start_loop(*parts, tasks, demonstrations)
    return await build_imitation_loop(*parts, demonstrations)


def _build_server(
    runtime: Runtime[LearnerConfig],
    vendors: LearnerDependencies,
    state: RunState,
    limits: asyncio.Future[TokenLimits],
) -> grpc.aio.Server:
    """Build the server with all services, not started yet."""
    config, drain = runtime.config, runtime.drain
    groups = GroupService(
        dispatcher=state.dispatcher,
        status=state.status,
        limits=limits,
        tokenizer=vendors.tokenizer,
        drain=drain,
        intake=config.intake,
    )
    policies = PolicyService(
        broadcast=state.broadcast,
        dispatcher=state.dispatcher,
        guard=state.guard,
        tokenizer=vendors.tokenizer,
        weight_server=vendors.weight_server,
        sender=vendors.sender,
        weights=config.weights,
        sends_from_gpu=config.rank.device == "cuda",
        publish_timeout_s=config.publish_timeout_s,
    )
    return build_server(runtime.token, groups, policies)


def _heartbeat_status(state: RunState, limits: asyncio.Future[TokenLimits]) -> ReplicaStatus:
    """Return the run's status for a heartbeat. The learner serves once `limits` are known."""
    status = state.status
    raised = [
        RaisedAlarm(v.rule, v.scope, v.severity, alarm.step, v.cause, v.fix)
        for alarm in state.alarms.raised[:_MAX_ALARMS]
        for v in (alarm.verdict,)
    ]
    head = (status.phase, limits.done(), status.step, status.total_steps)
    return ReplicaStatus(
        *head, metrics=status.metrics, alarms=raised, tracker_url=status.tracker_url
    )


async def _run_with_helpers(
    run: Coroutine[Any, Any, bool], state: RunState, runtime: Runtime[LearnerConfig]
) -> bool:
    """Run the train loop and its background tasks; the first failure of any ends all of them.

    Return True when the run is done, False when it was drained."""
    dispatcher, status = state.dispatcher, state.status
    export_metrics = make_metrics_exporter(dispatcher, status, runtime.watchdog, state.alarms)
    helpers = running_tasks(
        _repeat_every(min(1.0, dispatcher.book.rules.ttl_s / 4), dispatcher.expire_overdue),
        _run_when_set(runtime.drain, dispatcher.stop_leasing),
        state.journal.wait_until_broken(),
        state.guard.wait_for_mismatch(),
        state.checkpoints.wait_until_failed(),
        state.uploads.wait_until_fenced(),
        *([] if state.judges is None else [state.judges.judge_groups()]),
        _export_metrics(export_metrics),
    )
    async with helpers as beside, running_tasks(run) as (main,):
        try:
            return await wait_beside(main, beside)
        except Exception as error:
            status.error = str(error)[:2000]
            state.alarms.report_failure(status.error or repr(error))
            status.enter_phase(Phase.FAILED)
            raise


async def _export_metrics(show: Callable[[], None]) -> None:
    while True:
        show()
        await asyncio.sleep(1.0)


async def _repeat_every(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(seconds)
        await work()


async def _run_when_set(
    event: asyncio.Event, work: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    await event.wait()
    await work()
