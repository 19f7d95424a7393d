"""Composition root: build a learner from its dependencies, and run it."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import grpc.aio

from flotilla.learner.v1 import (
    group_service_pb2_grpc,
    policy_service_pb2_grpc,
    rank_service_pb2_grpc,
)
from services.common import rpc
from services.common.errors import ConfigError
from services.common.run_membership import RaisedAlarm, ReplicaStatus
from services.common.runtime import Runtime
from services.learner.alarms.alarms import Alarms
from services.learner.api.decode import TokenLimits
from services.learner.api.group_service import GroupService
from services.learner.api.policy_service import PolicyService
from services.learner.api.rank_service import RankService
from services.learner.checkpoints import remote_claim
from services.learner.checkpoints.export import export_newest
from services.learner.checkpoints.remote_target import remote_target_of
from services.learner.checkpoints.remote_upload import Identity
from services.learner.checkpoints.uploaded_checkpoints import UploadedCheckpoints
from services.learner.checkpoints.uploads import CheckpointUploads
from services.learner.config.learner import LearnerConfig
from services.learner.dependencies import LearnerDependencies
from services.learner.groups.dispatcher import GroupDispatcher
from services.learner.groups.restore import start_dispatcher
from services.learner.guard.mismatch_guard import GUARD_META, MismatchGuard
from services.learner.journal.connection import JournalError
from services.learner.journal.row_codec import count_fates
from services.learner.journal.store import Journal, open_journal
from services.learner.ports import Ranks
from services.learner.ranks.machines import dismiss_at_end
from services.learner.run.clock import RunClock
from services.learner.run.context import RunContext
from services.learner.run.eval_report import EvalSet
from services.learner.run.prometheus import make_metrics_exporter
from services.learner.run.resume_checks import check_tasks_are_the_same, check_tokenizer_is_the_same
from services.learner.run.status import LearnerStatus, Phase
from services.learner.run.step_recorder import ALARMS_META, load_tracked_run
from services.learner.run.task_files import load_task_files
from services.learner.run.train_loop import TrainLoop
from services.learner.types import ModelInfo
from services.learner.weights.weight_broadcast import CANARY_TOLERANCE, WeightBroadcast

# That one heartbeat carries.
_MAX_ALARMS = 64


async def run_learner(runtime: Runtime[LearnerConfig], vendors: LearnerDependencies) -> None:
    """Serve and train until the run is done or drained."""
    config = runtime.config
    tasks, eval_sets = load_task_files(config, runtime.shared.seed)
    try:
        journal = await asyncio.to_thread(open_journal, runtime.run_dir)
    except JournalError as error:
        raise ConfigError(str(error)) from error
    try:
        await check_tokenizer_is_the_same(journal, vendors.tokenizer)
        if config.mode == "train":
            await check_tasks_are_the_same(journal, tasks, config, runtime.shared.seed)
        place = remote_target_of(vendors.store, runtime)
        await remote_claim.check_claims(place, journal, runtime.run_id)
        dispatcher = await start_dispatcher(config, journal, tasks, runtime.shared.seed)
        who = Identity(runtime.run_id, dispatcher.run_epoch, runtime.incarnation)
        uploads = await remote_claim.claim_epoch(place, journal, who)
        try:
            done = await _serve_and_train(runtime, vendors, journal, dispatcher, eval_sets, uploads)
            if done and config.mode == "train":
                await export_newest(journal, runtime.run_dir, vendors.export)
            await uploads.finish(config.checkpoint.remote_exit_s)
        finally:
            uploads.close()
    finally:
        await journal.close()


async def _serve_and_train(
    runtime: Runtime[LearnerConfig],
    vendors: LearnerDependencies,
    journal: Journal,
    dispatcher: GroupDispatcher,
    eval_sets: list[EvalSet],
    uploads: CheckpointUploads,
) -> bool:
    """Serve and train. Return True when the run is done, False when it was drained before."""
    config = runtime.config
    runtime.watchdog.limit_s = config.stall_s
    status = LearnerStatus(total_steps=config.steps)
    limits: asyncio.Future[TokenLimits] = asyncio.get_running_loop().create_future()
    broadcast = WeightBroadcast(
        canary_tolerance=CANARY_TOLERANCE[runtime.shared.policy.dtype],
        attach_grace_s=config.attach_grace_s,
    )
    parts = await _build_context(
        runtime, vendors, journal, dispatcher, broadcast, status, eval_sets, uploads
    )
    server = _build_server(runtime, vendors, parts, limits)
    async with runtime.serving(server) as serving:

        def accept_calls(info: ModelInfo) -> None:
            limits.set_result(TokenLimits(info.vocab_size, runtime.shared.policy.max_model_len))
            serving.set_serving(True)

        runtime.report_status(partial(_heartbeat_status, status, parts.alarms, limits))
        await runtime.announce(serving.address)
        runtime.log.info("serving", address=serving.address, run_epoch=dispatcher.run_epoch)
        loop = TrainLoop(parts, on_loaded=accept_calls)
        try:
            with dismiss_at_end(vendors.roll):
                return await _run_with_helpers(loop, parts, runtime)
        finally:
            serving.set_serving(False)
            # Calls that wait would hold up the server's end.
            await dispatcher.stop_leasing()
            broadcast.close()


def _build_server(
    runtime: Runtime[LearnerConfig],
    vendors: LearnerDependencies,
    parts: RunContext,
    limits: asyncio.Future[TokenLimits],
) -> grpc.aio.Server:
    """Build the server with all services, not started yet."""
    server = rpc.server(token=runtime.token)
    group_service_pb2_grpc.add_GroupServiceServicer_to_server(
        GroupService(
            parts.dispatcher,
            parts.status,
            limits,
            tokenizer=vendors.tokenizer,
            drain=runtime.drain,
            intake=runtime.config.intake,
        ),
        server,
    )
    policy_service_pb2_grpc.add_PolicyServiceServicer_to_server(
        PolicyService(
            parts.broadcast,
            parts.dispatcher,
            parts.guard,
            tokenizer=vendors.tokenizer,
            weight_server=vendors.weight_server,
            share_memory=runtime.config.weights.network == "private",
            publish_timeout_s=runtime.config.publish_timeout_s,
        ),
        server,
    )
    if vendors.roll is not None:
        service = RankService(vendors.roll, drain=runtime.drain)
        rank_service_pb2_grpc.add_RankServiceServicer_to_server(service, server)
    return server


async def _build_context(
    runtime: Runtime[LearnerConfig],
    vendors: LearnerDependencies,
    journal: Journal,
    dispatcher: GroupDispatcher,
    broadcast: WeightBroadcast,
    status: LearnerStatus,
    eval_sets: list[EvalSet],
    uploads: CheckpointUploads,
) -> RunContext:
    config, run_epoch = runtime.config, dispatcher.run_epoch
    meta = await journal.read_meta()
    tracked = await load_tracked_run(journal)
    dispatcher.tally.received_before = (await journal.run_read(count_fates))["acknowledged"]
    await asyncio.to_thread(vendors.tracker.open_run, tracked)
    alarms = _build_alarms(runtime, vendors, journal, meta.get(ALARMS_META, {}))
    status.flags = lambda: alarms.metrics
    return RunContext(
        config=config,
        seed=runtime.shared.seed,
        run_dir=runtime.run_dir,
        ranks=vendors.ranks,
        journal=journal,
        dispatcher=dispatcher,
        broadcast=broadcast,
        guard=_build_guard(runtime, vendors.ranks, journal, run_epoch, meta.get(GUARD_META, {})),
        snapshots=vendors.snapshots,
        checkpoints=_build_checkpoints(runtime, journal, uploads, run_epoch),
        uploads=uploads,
        eval_sets=eval_sets,
        tracker=vendors.tracker,
        tracked=tracked,
        alarms=alarms,
        status=status,
        clock=RunClock.from_seconds(meta.get("seconds", {})),
        watchdog=runtime.watchdog,
        drain=runtime.drain,
        launcher_metrics=lambda: runtime.launcher_metrics,
    )


def _build_checkpoints(
    runtime: Runtime[LearnerConfig], journal: Journal, uploads: CheckpointUploads, run_epoch: int
) -> UploadedCheckpoints:
    return UploadedCheckpoints(
        uploads,
        runtime.run_dir,
        journal,
        run_id=runtime.run_id,
        run_epoch=run_epoch,
        keep=runtime.config.checkpoint.keep,
    )


def _build_guard(
    runtime: Runtime[LearnerConfig],
    ranks: Ranks,
    journal: Journal,
    run_epoch: int,
    state: dict[str, Any],
) -> MismatchGuard:
    config, policy = runtime.config, runtime.shared.policy
    return MismatchGuard(
        config, policy, ranks, journal, runtime.run_dir, run_epoch=run_epoch, state=state
    )


def _build_alarms(
    runtime: Runtime[LearnerConfig],
    vendors: LearnerDependencies,
    journal: Journal,
    remembered: dict[str, Any],
) -> Alarms:
    """Build the alarms; they hear of standstills and of damage, earlier damage included."""
    config = runtime.config
    alarms = Alarms(
        config.alarms,
        vendors.alarm_sinks,
        max_staleness=config.max_staleness,
        remembered=remembered,
    )
    alarms.on_change = runtime.hurry_heartbeat
    runtime.watchdog.on_standstill = alarms.report_standstill
    for incident in journal.incidents.newest:
        alarms.report_damage(incident)
    journal.incidents.on_report = alarms.report_damage
    return alarms


def _heartbeat_status(
    status: LearnerStatus, alarms: Alarms, limits: asyncio.Future[TokenLimits]
) -> ReplicaStatus:
    """Return the run's status for a heartbeat. The learner serves once `limits` are known."""
    raised = [
        RaisedAlarm(v.rule, v.scope, v.severity, alarm.step, v.cause, v.fix)
        for alarm in alarms.raised[:_MAX_ALARMS]
        for v in (alarm.verdict,)
    ]
    head = (status.phase, limits.done(), status.step, status.total_steps)
    return ReplicaStatus(*head, metrics=status.metrics, alarms=raised)


async def _run_with_helpers(
    loop: TrainLoop, parts: RunContext, runtime: Runtime[LearnerConfig]
) -> bool:
    """Run the loop, with what runs beside it; the first failure of any ends all.

    Return True when it is done, False when it was drained."""
    dispatcher, status = parts.dispatcher, parts.status
    main = asyncio.create_task(loop.run_until_done(), name="loop")
    beside = [
        asyncio.create_task(
            _repeat_every(min(1.0, dispatcher.book.rules.ttl_s / 4), dispatcher.expire_overdue)
        ),
        asyncio.create_task(_run_when_set(runtime.drain, dispatcher.stop_leasing)),
        asyncio.create_task(parts.journal.wait_until_broken()),
        asyncio.create_task(parts.guard.wait_for_mismatch()),
        asyncio.create_task(parts.uploads.wait_until_fenced()),
        asyncio.create_task(
            _export_metrics(
                make_metrics_exporter(dispatcher, status, runtime.watchdog, parts.alarms)
            )
        ),
    ]
    try:
        running: set[asyncio.Task[Any]] = {main, *beside}
        while not main.done():
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        return main.result()
    except Exception as error:
        status.error = str(error)[:2000]
        parts.alarms.report_failure(status.error or repr(error))
        status.enter_phase(Phase.FAILED)
        raise
    finally:
        for task in (main, *beside):
            task.cancel()
        await asyncio.gather(main, *beside, return_exceptions=True)


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
